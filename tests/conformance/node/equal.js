// Steps envs of a hub through the client and prints what comes back as hex, a line of JSON per reset or step. equal.py runs it
// and compares. Arguments: a file that holds the hub's address, an env's id, the number of envs, and that of steps.

import fs from 'node:fs';
import { NDArray, VectorEnv } from './client.js';

const [file, id, numEnvs, steps] = process.argv.slice(2).map((text, index) => (index < 2 ? text : Number(text)));
const hex = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString('hex');
const leaves = (batch) => (batch instanceof NDArray ? [hex(batch.data)] : Object.values(batch).flatMap(leaves));

// The rule of the actions, the same as in equal.py.
let state = 1;
function random() {
  state = Number((BigInt(state) * 1103515245n + 12345n) % 2147483648n);
  return Math.floor(state / 65536);
}

const env = await VectorEnv.make(fs.readFileSync(file, 'utf8').trim(), id, numEnvs);
const { n } = env.actionSpace.description;
console.log(JSON.stringify(leaves((await env.reset(42)).observations)));
for (let step = 0; step < steps; step++) {
  const actions = Array.from({ length: numEnvs }, () => (n ? random() % n : (random() % 4001) / 1000 - 2));
  const { observations, rewards, terminations, truncations } = await env.step(actions);
  console.log(JSON.stringify([...leaves(observations), hex(rewards), hex(terminations), hex(truncations)]));
}
await env.close();

// The programs of the kit (levels basic, resilient and parts): python -m conformance.kit client "node programs.js".

import { GivenUp, VectorEnv } from './client.js';

const SEEDS = [7, 8];
const STEPS = 8;
const GIVEN_UP_STEP = 3;
const ROUNDS = 4;
const [program, address] = process.argv.slice(2);
const sums = { rewards: [0, 0], ends: [0, 0], numbers: [0, 0] };
let seen = [0, 0]; // the first number of the last observation of each env

// Takes a batch whose rows these are, and adds its results, if it has some.
function take({ observations, rewards, terminations, truncations, infos }, rows = [0, 1]) {
  rows.forEach((row, index) => {
    seen[row] = observations.data[2 * index];
    if (!rewards) return;
    sums.rewards[row] += rewards[index];
    sums.ends[row] += terminations[index] | truncations[index];
    sums.numbers[row] += Number(infos[index].n ?? 0);
  });
}

async function steps(env, count) {
  for (let step = 0; step < count; step++) take(await env.step(seen));
}

const env = await VectorEnv.make(address, 'Conformance-v0', 2, { warn: () => {} });
try {
  take(await env.reset(SEEDS));
  if (program === 'parts') {
    for (let round = 0; round < ROUNDS; round++) {
      for (const row of [1, 0]) await env.send([row], [seen[row]]);
      for (let missing = 2; missing > 0;) {
        const batch = await env.receive(1);
        take(batch, batch.rows);
        missing -= batch.rows.length;
      }
    }
  } else {
    if (program === 'give_up') {
      await steps(env, GIVEN_UP_STEP - 1);
      await env.step(seen, { timeout: 1 }).catch((error) => { if (!(error instanceof GivenUp)) throw error; });
      Object.values(sums).forEach((each) => each.fill(0));
      take(await env.reset(SEEDS));
    }
    await steps(env, STEPS);
  }
  await env.call('check', [sums.rewards, sums.ends, sums.numbers]);
} finally {
  await env.close({ timeout: 5 }).catch(() => {});
}

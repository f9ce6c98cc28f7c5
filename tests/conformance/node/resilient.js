// Loses connections, requests, replies and hubs under the client. Argument: a file that holds the address of a hub with a key.

import assert from 'node:assert/strict';
import fs from 'node:fs';
import net from 'node:net';
import { Router } from 'zeromq';
import { Failure, GivenUp, HubLost, VectorEnv, pack } from './client.js';
import { packRows } from './spaces.js';

const address = fs.readFileSync(process.argv[2], 'utf8').trim();
const [, key, host, port] = /^envhub:\/\/([^@]+)@(.+):(\d+)$/.exec(address);
const warnings = [];
const warn = (text) => warnings.push(text);

// A TCP proxy before the hub. `mute` swallows the hub's bytes, and `cut` says whether bytes end the connection instead.
const proxy = { mute: false, cut: () => false, pairs: new Set(), connections: 0 };
const server = net.createServer((client) => {
  const hub = net.connect(Number(port), host);
  const pair = { end: () => { client.destroy(); hub.destroy(); proxy.pairs.delete(pair); }, bytes: 0 };
  proxy.pairs.add(pair);
  proxy.connections += 1;
  client.on('data', (data) => (proxy.cut('request', data, pair) ? pair.end() : hub.write(data)));
  hub.on('data', (data) => { if (!proxy.mute) (proxy.cut('reply', data, pair) ? pair.end() : client.write(data)); });
  for (const socket of [client, hub]) socket.on('close', pair.end).on('error', pair.end);
});
await new Promise((resolve) => { server.listen(0, '127.0.0.1', resolve); });
const proxied = `envhub://${key}@127.0.0.1:${server.address().port}`;

async function episode(at, steps, between = () => {}) {
  const env = await VectorEnv.make(at, 'CartPole-v1', 3, { warn });
  const seen = [(await env.reset(5)).observations.bytes.toString()];
  for (let step = 0; step < steps; step++) {
    await between(step);
    const { observations, rewards } = await env.step([step % 2, 1, (step >> 1) % 2]);
    seen.push(observations.bytes.toString() + rewards.toString());
  }
  await env.close();
  return seen;
}

// 1. Connections end between requests, and during them: before the request passed, and before its reply did.
const wanted = await episode(address, 60);
assert.deepEqual(await episode(proxied, 60, (step) => { if (step % 5 === 0) for (const pair of proxy.pairs) pair.end(); }), wanted);
console.log(`connections end between requests: equal, ${proxy.connections} connections`);
for (const side of ['request', 'reply']) {
  let cuts = 0;
  let armed = false;
  proxy.cut = (from) => (armed && from === side ? (armed = false, ++cuts) : false);
  assert.deepEqual(await episode(proxied, 60, (step) => { armed = step % 5 === 0; }), wanted);
  console.log(`connections end with a ${side}: equal, ${cuts} cuts`);
}
proxy.cut = () => false;

// 2. The caller gives a request up whose reply does not come. The next one follows it.
let env = await VectorEnv.make(proxied, 'CartPole-v1', 2, { warn, timeout: 5 });
await env.reset(1);
proxy.mute = true;
await assert.rejects(env.step([0, 0]), GivenUp);
proxy.mute = false;
for (const pair of proxy.pairs) pair.end();
const counted = await env.step([1, 1]);
assert.equal(counted.rewards.length, 2);
console.log('a request is given up, and the next one follows');

// 3. What is sent ends the connection each time.
const before = proxy.connections;
proxy.cut = (from, data, pair) => from === 'request' && data.length > 400 && (pair.bytes += data.length) > 0;
await assert.rejects(env.call('has_wrapper_attr', ['x'.repeat(2000)]), /ten times/);
console.log(`a request that ends connections is given up: after ${proxy.connections - before} more connections`);
proxy.cut = () => false;
await env.close();

// 4. Refusals.
env = await VectorEnv.make(address, 'CartPole-v1', 1, { warn });
await assert.rejects(env.step([0]), (error) => error instanceof Failure && error.type === 'gymnasium.error.ResetNeeded');
await env.close();
await assert.rejects(VectorEnv.make(address, 'Nothing-v0', 1), { code: 'unknown_env' });
await assert.rejects(VectorEnv.make(`tcp://${host}:${port}`, 'CartPole-v1', 1), /has keys/);
const other = Buffer.from(key, 'base64url');
other[40] ^= 1;
await assert.rejects(VectorEnv.make(`envhub://${other.toString('base64url')}@${host}:${port}`, 'CartPole-v1', 1), /does not know/);
other[40] ^= 1;
other[0] ^= 1;
await assert.rejects(VectorEnv.make(`envhub://${other.toString('base64url')}@${host}:${port}`, 'CartPole-v1', 1), /another key/);
// What ends each connection, and is no hub with a key, may be a hub that stops: the caller's time ends the HELLO.
const ender = net.createServer((socket) => socket.destroy());
await new Promise((resolve) => { ender.listen(0, '127.0.0.1', resolve); });
await assert.rejects(VectorEnv.make(`envhub://${key}@127.0.0.1:${ender.address().port}`, 'CartPole-v1', 1, { warn, helloTimeout: 6 }), GivenUp);
ender.close();
console.log('refusals are told');

// 5. A hub is lost: a stand-in with two actions and the observation 1, whose id changes.
let id = 1n;
const made = [];
const one = Buffer.from([1, 0, 0, 0, 0, 0, 0, 0]);
const lostRow = packRows([{ invalid_transition: true, env_failure: { cause: 'hub_lost' } }]);
const router = new Router({ linger: 0 });
await router.bind('tcp://127.0.0.1:*');
(async () => {
  const space = { space: 'Discrete', n: 2, start: 0, dtype: '<i8' };
  for await (const [peer, first] of router) {
    const op = first[6];
    const stale = op !== 1 && first.readBigUInt64LE(8) !== id;
    const reply = Buffer.from(first.subarray(0, 40));
    reply[6] = stale ? 255 : op + 128;
    reply.writeBigUInt64LE(id, 8);
    if (op === 16 && !stale) made.push(first.includes('lost'));
    const header = stale ? { code: 'stale_hub', scope: 'hub', message: 'gone' }
      : { 1: { hub: '0', version: '1.2', private: false, limits: {} }, 16: { num_envs: 1, num_workers: 1, observation_spaces: [pack(space)], action_space: pack(space) } }[op];
    // The first step of a session in place of a lost one has no observation.
    const step = made.at(-1) ? [Buffer.alloc(8), Buffer.alloc(10), lostRow] : [one, Buffer.alloc(10)];
    const frames = stale ? [] : { 17: [one], 18: step }[op] ?? [];
    await router.send([peer, Buffer.concat([reply, header ? pack(header) : Buffer.alloc(0)]), ...frames]);
  }
})();
for (const remake of [false, true]) {
  env = await VectorEnv.make(router.lastEndpoint, 'Stand-in', 1, { remake, warn });
  await env.reset();
  await env.step([0]);
  id += 1n;
  if (remake) assert.equal((await env.step([0])).observations.data[0], 1n);
  else await assert.rejects(env.step([0]), HubLost);
  await env.close();
}
assert.deepEqual(made, [false, false, true]);
console.log('a lost hub is told, or its session is made again with the last observations');
router.close();

// 6. Nothing listens at the address any more.
env = await VectorEnv.make(proxied, 'CartPole-v1', 1, { warn });
server.close();
for (const pair of proxy.pairs) pair.end();
const began = Date.now();
await assert.rejects(env.reset(1), HubLost);
console.log(`a hub that refuses connections is lost after ${((Date.now() - began) / 1000).toFixed(1)} s`);
await env.close();
console.log(`warnings: ${[...new Set(warnings)].join(' | ')}`);

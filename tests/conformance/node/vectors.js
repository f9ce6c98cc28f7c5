// The vectors of golden.json through the codec. Argument: golden.json. Node's assert ends it at the first difference.

import assert from 'node:assert/strict';
import fs from 'node:fs';
import { Complex, FrozenSet, NDArray, NDScalar, Tuple, pack, unpack, unpackHeader } from './codec.js';
import { Space, unpackRows } from './spaces.js';
import { publicKey } from './client.js';

const golden = JSON.parse(fs.readFileSync(process.argv[2], 'utf8'));
const bytes = (text) => Buffer.from(text, 'hex');
const PRELUDE = 40;
let count = 0;

// The values of golden.json's expressions that JavaScript can say.
const expected = {
  'nil, bools, numbers, text, bytes': [null, true, -1, 2n ** 63n, 0.5, 'ä', Buffer.of(0, 255)],
  'complex': new Complex(1.5, -2),
  'tuple': Tuple.of(1, Tuple.of(2)),
  'set of one': new Set([3]),
  'frozen set of one': new FrozenSet(['x']),
  'integers beyond 64 bits': [2n ** 70n, -(2n ** 70n)],
  'stand-in': '<opaque>',
  'map with other keys': new Map([[1, 'one'], [Tuple.of(2), 'two']]),
};
for (const [name, text] of Object.entries(golden.values)) {
  const value = unpack(bytes(text));
  if (name !== 'stand-in') assert.equal(pack(value).toString('hex'), text, name); // a REPR decodes to text
  if (name in expected) assert.deepEqual(value, expected[name], name);
  if (name === 'array') assert.deepEqual([value.shape, [...value.data]], [[2, 2], [1.5, -2, 0, 3]]);
  if (name === 'NumPy scalar') assert.ok(value instanceof NDScalar && value.value === -3n);
  count++;
}
for (const [name, text] of Object.entries(golden.bad_values)) {
  assert.throws(() => unpack(bytes(text)), undefined, name);
  count++;
}

// Every header is read. One of this client's own is written again to the same bytes, which a STEP's is not.
for (const [name, frames] of [...Object.entries(golden.session), ...Object.entries(golden.exchanges)]) {
  const [first] = [frames].flat();
  const header = bytes(first).subarray(PRELUDE);
  count++;
  if (header.length === 0 || (name.startsWith('STEP') && name.endsWith('request'))) continue;
  assert.equal(pack(unpackHeader(header)).length > 0, true);
  if (name.endsWith('request') && !first.includes('cb')) assert.equal(pack(unpackHeader(header)).toString('hex'), header.toString('hex'), name);
}

// A header that a hub refuses because it cannot be read is refused here as well.
for (const name of [
  'a header of no bytes', 'a header that is no map', 'a header that ends early', 'a header with bytes after it',
  'a list of more items than there are bytes', 'lists nine deep', 'an extension in a header',
]) {
  assert.throws(() => unpackHeader(bytes(golden.refusals[name][0]).subarray(PRELUDE)), undefined, name);
  count++;
}

// The session's spaces, observations, actions and infos.
const made = unpackHeader(bytes(golden.session['MAKE reply'][0]).subarray(PRELUDE));
const observations = new Space(made.observation_spaces[0], 2);
const step = golden.session['STEP reply'].map(bytes);
const [array] = observations.decode(step.slice(1), 2);
assert.ok(array instanceof NDArray);
assert.deepEqual([array.shape, [...array.data]], [[2, 4], [0, 0.5, 0, -0.5, 1, 0, -1, 0]]);
const info = unpack(unpackRows(step[3], 2).get(1));
assert.equal(info.n.value, 3n);
const { codes, frames } = new Space(made.action_space, 2).encode([0, 1], 2);
const request = golden.session['STEP request'];
assert.deepEqual([codes.toString('hex'), frames[0].toString('hex')], [request[0].slice(2 * PRELUDE), request[1]]);

// The example of a key.
const secret = Buffer.from(Array.from({ length: 32 }, (_, index) => index));
assert.equal(publicKey(secret).toString('hex'), '8f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f');
// The exchange's MAKE has spaces of every kind.
const rich = unpackHeader(bytes(golden.exchanges['MAKE reply'][0]).subarray(PRELUDE));
const kinds = new Space(rich.observation_spaces[0], rich.num_envs).leaves.map((leaf) => leaf.object || leaf.dtype);
console.log(`${count} vectors hold; the exchange's leaves are ${JSON.stringify(kinds)}`);

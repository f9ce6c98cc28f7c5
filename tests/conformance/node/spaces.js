// Spaces, and the arrays of their elements: the sections "Spaces", "Arrays" and "Action codes".

import { CodecError, NDArray, Tuple, itemSize, isMap, pack, sizeOf, typedArrayOf, unpack } from './codec.js';

const ARRAYS_MAX = 2 ** 30; // bytes of one space's elements, of all envs
const OBJECTS = new Set(['Text', 'Sequence', 'Graph', 'OneOf', 'Anything']);
const ACTION_CODES = ['b1', 'i1', 'i2', 'i4', 'i8', 'u1', 'u2', 'u4', 'u8', 'f2', 'f4', 'f8'];
export const OUT_OF_BAND = 127;

/** A space of a Made, checked: `leaves` in their order, and the tree that they are in. */
export class Space {
  constructor(bytes, numEnvs) {
    this.description = unpack(bytes);
    this.numEnvs = numEnvs;
    this.leaves = [];
    this.spaces = 0;
    this.tree = this.#tree(this.description);
    if (this.leaves.length > 1000) throw new CodecError('a space has too many leaves');
    this.fixed = this.leaves.filter((leaf) => !leaf.object);
    this.objects = this.leaves.filter((leaf) => leaf.object);
    // What arrays of such elements take is known before one is made.
    this.bytes = this.fixed.reduce((sum, leaf) => sum + leaf.rowBytes * numEnvs, 0);
    if (this.bytes > ARRAYS_MAX) throw new CodecError('the elements of a space are too large');
  }

  #tree(space) {
    if (!isMap(space) || ++this.spaces > 4096) throw new CodecError('a space has another form, or too many spaces');
    const { space: kind, dtype, shape, keys, spaces } = space;
    if (kind === 'Dict' || kind === 'Tuple') {
      if (!Array.isArray(spaces) || (keys && keys.length !== spaces.length)) throw new CodecError(`a ${kind} has another form`);
      return { kind, keys, branches: spaces.map((branch) => this.#tree(branch)) };
    }
    if (kind === 'Box') return this.#leaf(dtype, shape);
    if (kind === 'Discrete') return this.#leaf(dtype, []);
    if (kind === 'MultiDiscrete') return this.#leaf(dtype, space.nvec?.shape);
    if (kind === 'MultiBinary') return this.#leaf('|i1', space.n);
    if (!OBJECTS.has(kind)) throw new CodecError(`a space that is unknown: ${String(kind)}`);
    return this.#add({ object: true });
  }

  #leaf(dtype, shape) {
    const rowBytes = itemSize(dtype) * sizeOf(shape);
    if (dtype.includes('c') ) throw new CodecError(`a leaf of the dtype ${dtype}`);
    if (shape.length > 30) throw new CodecError('a leaf has too many dimensions');
    return this.#add({ object: false, dtype, shape, rowBytes });
  }

  #add(leaf) {
    this.leaves.push(leaf);
    return { kind: 'leaf', index: this.leaves.length - 1 };
  }

  /**
   * A batch of elements: of a Box, Discrete, MultiDiscrete or MultiBinary an NDArray, of another leaf a list with an item
   * per row, of a Dict an object (a Map if a key is no text), and of a Tuple a Tuple.
   */
  assemble(values, tree = this.tree) {
    if (tree.kind === 'leaf') return values[tree.index];
    const branches = tree.branches.map((branch) => this.assemble(values, branch));
    if (tree.kind === 'Tuple') return Tuple.from(branches);
    const entries = tree.keys.map((key, index) => [key, branches[index]]);
    return tree.keys.every((key) => typeof key === 'string') ? Object.fromEntries(entries) : new Map(entries);
  }

  /** The leaves of a batch, which is nested as `assemble` nests it. */
  take(batch, tree = this.tree) {
    if (tree.kind === 'leaf') return [batch];
    return tree.branches.flatMap((branch, index) => {
      const key = tree.kind === 'Dict' ? tree.keys[index] : index;
      const part = batch instanceof Map ? batch.get(key) : batch?.[key];
      if (part === undefined) throw new TypeError(`the batch has no ${String(key)}`);
      return this.take(part, branch);
    });
  }

  /** The observation frames of `rows` rows, checked, as NDArrays in the order of the fixed leaves. */
  decode(frames, rows) {
    return this.fixed.map((leaf, index) => {
      if (frames[index].length !== rows * leaf.rowBytes) throw new CodecError('a frame of observations has another length');
      return new NDArray(leaf.dtype, [rows, ...leaf.shape], new Uint8Array(frames[index]));
    });
  }

  /**
   * What a STEP of `rows` rows sends: the action codes, the array frames, and the values out of band (null if none).
   * Numbers are cast to the dtype of the space, since JavaScript has one kind of number only. An NDArray keeps its dtype.
   */
  encode(actions, rows) {
    const codes = [];
    const frames = [];
    const outOfBand = [];
    this.take(actions).forEach((batch, index) => {
      const leaf = this.leaves[index];
      if (leaf.object) {
        if (batch.length !== rows) throw new RangeError(`${rows} actions are due`);
        codes.push(OUT_OF_BAND);
        outOfBand.push(batch);
        return;
      }
      const array = batch instanceof NDArray ? batch : cast(batch, leaf, rows);
      const code = ACTION_CODES.indexOf(array.dtype.slice(1));
      if (code < 0 || array.bytes.length !== rows * (leaf.rowBytes / itemSize(leaf.dtype)) * itemSize(array.dtype)) {
        throw new RangeError('actions of another dtype or number than the space has');
      }
      codes.push(code);
      frames.push(Buffer.from(array.bytes)); // a copy: the frame must not change while the request is pending
    });
    const values = outOfBand.length === 0 ? null : Array.from({ length: rows }, (_, row) => outOfBand.map((batch) => batch[row]));
    return { codes: Buffer.from(codes), frames, values };
  }
}

// Numbers, bools or bigints, nested in any way, as an NDArray of a leaf.
function cast(batch, leaf, rows) {
  const flat = ArrayBuffer.isView(batch) ? Array.from(batch) : [batch].flat(Infinity);
  const Items = typedArrayOf(leaf.dtype);
  if (leaf.dtype.includes('f2')) throw new TypeError('half floats are given as an NDArray');
  const data = Items.from(flat, Items.name.startsWith('Big') ? BigInt : Number);
  return new NDArray(leaf.dtype.replace('>', '<'), [rows, ...leaf.shape], new Uint8Array(data.buffer));
}

/** A rows frame: entries of a row and its bytes. */
export function packRows(values) {
  return Buffer.concat(values.flatMap((value, row) => {
    const bytes = pack(value);
    const head = Buffer.alloc(8);
    head.writeUInt32LE(row, 0);
    head.writeUInt32LE(bytes.length, 4);
    return [head, bytes];
  }));
}

/** The entries of a rows frame, as a Map from rows to bytes. */
export function unpackRows(frame, numEnvs) {
  const entries = new Map();
  let last = -1;
  for (let at = 0; at < frame.length;) {
    if (frame.length - at < 8) throw new CodecError('a rows frame ends early');
    const row = frame.readUInt32LE(at);
    const length = frame.readUInt32LE(at + 4);
    at += 8;
    if (row <= last || row >= numEnvs) throw new CodecError('the rows of a rows frame do not ascend');
    if (length > frame.length - at) throw new CodecError('a rows frame ends early');
    entries.set(row, frame.subarray(at, at + length));
    last = row;
    at += length;
  }
  return entries;
}

// Values and headers of the EnvHub protocol: msgpack with the extensions of the section "Values".
//
// Written by hand because the usual packages do not tell integers from floats, and do not bound what a message may
// announce.

/** What a peer sent breaks the protocol, or a value cannot be carried. */
export class CodecError extends Error {}

/** A number that is sent as a float although it is whole. Python tells 1 from 1.0, JavaScript does not. */
export class Float {
  constructor(value) { this.value = value; }
}

/** Python's tuple. */
export class Tuple extends Array {}

/** Python's frozenset. A Set is a set, and a Map is a dict with keys that are not all text. */
export class FrozenSet extends Set {}

export class Complex {
  constructor(real, imaginary) { Object.assign(this, { real, imaginary }); }
}

/** Any other extension, by the names of EXTENSIONS; `value` is what its data holds. */
export class Extension {
  constructor(name, value) { Object.assign(this, { name, value }); }
}

const EXTENSIONS = {
  1: 'TUPLE', 2: 'SET', 3: 'FROZENSET', 4: 'INTEGER', 5: 'COMPLEX', 6: 'MAPPING', 7: 'GENERATOR', 8: 'ARRAY',
  9: 'REPR', 11: 'GRAPH', 12: 'SCALAR', 13: 'SPEC', 14: 'SPACE', // 10, PICKLE, is refused: no hub is this client's own
};
const CODES = Object.fromEntries(Object.entries(EXTENSIONS).map(([code, name]) => [name, Number(code)]));

// --- Arrays ---------------------------------------------------------------------------------------------------------

// JavaScript has no array of half floats (f2) nor of long floats (f12, f16): their items are given as bits and bytes.
// A complex number (c8, c16) is two items.
const ITEMS = {
  b1: Uint8Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, i8: BigInt64Array,
  u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, u8: BigUint64Array,
  f2: Uint16Array, f4: Float32Array, f8: Float64Array, f12: Uint8Array, f16: Uint8Array,
  c8: Float32Array, c16: Float64Array,
};

/** Bytes of one item of a dtype such as `<f4`; refuses what is no boolean, integer, float or complex number. */
export function itemSize(dtype) {
  const match = typeof dtype === 'string' && dtype.length <= 4 && /^[<>|=]?([biufc](\d+))$/.exec(dtype);
  if (!match || !(match[1] in ITEMS)) throw new CodecError(`no dtype of numbers: ${String(dtype)}`);
  return Number(match[2]);
}

/** The product of a shape; refuses dimensions that are no whole numbers of at least 0. */
export function sizeOf(shape) {
  if (!Array.isArray(shape)) throw new CodecError('a shape is a list');
  let size = 1;
  for (const length of shape) {
    if (!Number.isSafeInteger(length) || length < 0) throw new CodecError('a dimension is no whole number');
    size *= length;
  }
  if (!Number.isSafeInteger(size)) throw new CodecError('an array is too large');
  return size;
}

/** An array of numbers, in C order. `bytes` are as sent; `data` is the typed array of them. */
export class NDArray {
  #data;

  constructor(dtype, shape, bytes) {
    if (shape.length > 31) throw new CodecError('an array has too many dimensions'); // 30 of a leaf, and the rows
    if (sizeOf(shape) * itemSize(dtype) !== bytes.length) throw new CodecError('an array has other bytes than items');
    Object.assign(this, { dtype, shape, bytes });
  }

  get data() { return (this.#data ??= typed(this.dtype, this.bytes)); }
}

/** A NumPy scalar. */
export class NDScalar {
  constructor(dtype, bytes) {
    if (itemSize(dtype) !== bytes.length) throw new CodecError('a scalar has other bytes than one item');
    Object.assign(this, { dtype, bytes });
  }

  get value() {
    const data = typed(this.dtype, this.bytes);
    if (this.dtype.includes('c')) return new Complex(data[0], data[1]);
    return this.dtype.endsWith('b1') ? data[0] !== 0 : data[0];
  }
}

/** The class of the typed array for the items of a dtype. */
export function typedArrayOf(dtype) {
  itemSize(dtype);
  return ITEMS[dtype.replace(/^[<>|=]/, '')];
}

// The bytes are copied: a typed array needs an aligned buffer, and a frame may begin anywhere.
function typed(dtype, bytes) {
  const Items = typedArrayOf(dtype);
  const copy = new Uint8Array(bytes);
  if (dtype.startsWith('>')) {
    for (let at = 0; at < copy.length; at += Items.BYTES_PER_ELEMENT) copy.subarray(at, at + Items.BYTES_PER_ELEMENT).reverse();
  }
  return new Items(copy.buffer);
}

// --- Text -----------------------------------------------------------------------------------------------------------

const utf8 = new TextEncoder();
const strictUtf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

// Python's text may hold lone surrogates, which travel like any other code point of three bytes.
function encodeText(text) {
  if (text.isWellFormed()) return utf8.encode(text);
  return Buffer.concat(Array.from(text, (character) => {
    const point = character.codePointAt(0);
    if (point < 0xd800 || point > 0xdfff) return Buffer.from(character);
    return Buffer.from([0xe0 | (point >> 12), 0x80 | ((point >> 6) & 63), 0x80 | (point & 63)]);
  }));
}

function decodeText(bytes) {
  try {
    return strictUtf8.decode(bytes);
  } catch {
    // Surrogates are ed a0..bf 80..bf; what lies between them must be UTF-8.
    let text = '';
    let begin = 0;
    const part = (end) => {
      try {
        text += strictUtf8.decode(bytes.subarray(begin, end));
      } catch {
        throw new CodecError('a text is not UTF-8');
      }
    };
    for (let at = 0; at + 2 < bytes.length; at++) {
      if (bytes[at] !== 0xed || (bytes[at + 1] & 0xe0) !== 0xa0 || (bytes[at + 2] & 0xc0) !== 0x80) continue;
      part(at);
      text += String.fromCharCode(0xd000 | ((bytes[at + 1] & 63) << 6) | (bytes[at + 2] & 63));
      begin = at + 3;
      at += 2;
    }
    part(bytes.length);
    return text;
  }
}

// --- Writing --------------------------------------------------------------------------------------------------------

/** The bytes of a value. Whole numbers become integers, other numbers floats; see Float. */
export function pack(value) {
  const parts = [];
  write(value, parts, 0);
  return Buffer.concat(parts);
}

// A head of msgpack: the first byte, then a number of `size` bytes.
function head(first, size, number) {
  const bytes = Buffer.alloc(1 + size);
  bytes[0] = first;
  if (size === 8) bytes.writeBigUInt64BE(BigInt.asUintN(64, BigInt(number)), 1);
  else if (size > 0) bytes.writeUIntBE(number, 1, size);
  return bytes;
}

// The heads of text, bytes, lists, maps and extensions: a short form, then lengths of 1, 2 and 4 bytes.
function sized(length, short, shortMax, first8, first16) {
  if (length <= shortMax) return head(short | length, 0);
  if (first8 && length < 2 ** 8) return head(first8, 1, length);
  if (length < 2 ** 16) return head(first16, 2, length);
  if (length < 2 ** 32) return head(first16 + 1, 4, length);
  throw new CodecError('a value is too large');
}

function writeInteger(value, parts) {
  const number = BigInt(value);
  if (number >= 2n ** 64n || number < -(2n ** 63n)) {
    const digits = (number < 0n ? '-0x' : '0x') + (number < 0n ? -number : number).toString(16);
    return writeExtension('INTEGER', Buffer.from(digits), parts);
  }
  if (number >= 0n) {
    if (number < 128n) parts.push(head(Number(number), 0));
    else if (number < 2n ** 8n) parts.push(head(0xcc, 1, Number(number)));
    else if (number < 2n ** 16n) parts.push(head(0xcd, 2, Number(number)));
    else if (number < 2n ** 32n) parts.push(head(0xce, 4, Number(number)));
    else parts.push(head(0xcf, 8, number));
  } else if (number >= -32n) parts.push(head(256 + Number(number), 0));
  else if (number >= -(2n ** 7n)) parts.push(head(0xd0, 1, 2 ** 8 + Number(number)));
  else if (number >= -(2n ** 15n)) parts.push(head(0xd1, 2, 2 ** 16 + Number(number)));
  else if (number >= -(2n ** 31n)) parts.push(head(0xd2, 4, 2 ** 32 + Number(number)));
  else parts.push(head(0xd3, 8, number));
}

function writeFloat(value, parts) {
  const bytes = Buffer.alloc(9, 0xcb);
  bytes.writeDoubleBE(value, 1);
  parts.push(bytes);
}

function writeExtension(name, data, parts) {
  const short = [1, 2, 4, 8, 16].indexOf(data.length);
  parts.push(short >= 0 ? head(0xd4 + short, 0) : sized(data.length, 0, -1, 0xc7, 0xc8), Buffer.from([CODES[name]]), data);
}

function writeBytes(bytes, parts) {
  parts.push(sized(bytes.length, 0, -1, 0xc4, 0xc5), bytes);
}

function writeText(text, parts) {
  const bytes = encodeText(text);
  parts.push(sized(bytes.length, 0xa0, 31, 0xd9, 0xda), bytes);
}

function writeArray(name, dtype, shape, bytes, parts) {
  const fields = [Buffer.of(0x84)];
  for (const [key, value] of [['nd', true], ['type', dtype], ['kind', Buffer.alloc(0)], ['shape', shape]]) {
    writeBytes(Buffer.from(key), fields);
    write(value, fields, 0);
  }
  const head = Buffer.concat(fields);
  writeExtension(name, Buffer.concat([Buffer.of(head.length), head, bytes]), parts);
}

function write(value, parts, around) {
  if (around > 64) throw new CodecError('a value is nested too deep');
  const inside = (item) => write(item, parts, around + 1);
  const packed = (name, items) => {
    const data = [];
    write(items, data, around + 1);
    writeExtension(name, Buffer.concat(data), parts);
  };
  if (value === null || value === undefined) parts.push(head(0xc0, 0));
  else if (typeof value === 'boolean') parts.push(head(value ? 0xc3 : 0xc2, 0));
  else if (typeof value === 'bigint') writeInteger(value, parts);
  else if (typeof value === 'number') {
    if (Number.isSafeInteger(value) && !Object.is(value, -0)) writeInteger(value, parts);
    else writeFloat(value, parts);
  } else if (typeof value === 'string') writeText(value, parts);
  else if (value instanceof Float) writeFloat(value.value, parts);
  else if (value instanceof Uint8Array) writeBytes(value, parts);
  else if (value instanceof Tuple) packed('TUPLE', Array.from(value));
  else if (Array.isArray(value)) {
    parts.push(sized(value.length, 0x90, 15, 0, 0xdc));
    value.forEach(inside);
  } else if (value instanceof FrozenSet) packed('FROZENSET', [...value]);
  else if (value instanceof Set) packed('SET', [...value]);
  else if (value instanceof Map) packed('MAPPING', [...value].flat(1));
  else if (value instanceof Complex) {
    writeExtension('COMPLEX', Buffer.from(Float64Array.of(value.real, value.imaginary).buffer), parts);
  } else if (value instanceof NDArray) writeArray('ARRAY', value.dtype, value.shape, value.bytes, parts);
  else if (value instanceof NDScalar) writeArray('SCALAR', value.dtype, [], value.bytes, parts);
  else if (value instanceof Extension && ['ARRAY', 'SCALAR'].includes(value.name)) writeArray(value.name, ...value.value, parts);
  else if (value instanceof Extension) packed(value.name, value.value);
  else if (typeof value === 'object') {
    const entries = Object.entries(value);
    parts.push(sized(entries.length, 0x80, 15, 0, 0xde));
    for (const [key, item] of entries) {
      writeText(key, parts);
      inside(item);
    }
  } else throw new CodecError(`no value of the protocol: ${typeof value}`);
}

// --- Reading --------------------------------------------------------------------------------------------------------

// The limits of the section "Limits". `around` of values is a bound against endless recursion only: the document bounds
// what a sender may nest (64), and an extension with its list inside is more than one level here.
const HEADER = { header: true, around: 8, items: 262144, bytes: 2 ** 30 };
const VALUE = { header: false, around: 256, items: Infinity, bytes: 2 ** 30 };
const LIST_MAX = 2 ** 20;
const TEXT_MAX = 2 ** 26;

/** The value that bytes hold, all of them. */
export function unpack(bytes) {
  return new Reader(bytes, VALUE).whole(0);
}

/** The map of a message's header, which may hold less than a value. */
export function unpackHeader(bytes) {
  const header = new Reader(bytes, HEADER).whole(0);
  if (!isMap(header)) throw new CodecError('a header is no map');
  return header;
}

/** Whether a value is a map with text keys, which has no prototype here: a key may be any text. */
export function isMap(value) {
  return typeof value === 'object' && value !== null && Object.getPrototypeOf(value) === null;
}

class Reader {
  constructor(bytes, limits) {
    this.bytes = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length);
    this.limits = limits;
    this.at = 0;
    this.items = 0;
  }

  whole(around) {
    const value = this.read(around);
    if (this.at !== this.bytes.length) throw new CodecError('bytes follow the value');
    return value;
  }

  take(length) {
    if (length > this.bytes.length - this.at) throw new CodecError('a value ends early');
    this.at += length;
    return this.bytes.subarray(this.at - length, this.at);
  }

  number(size) { return this.take(size).readUIntBE(0, size); }

  // The number of items that follow, checked before anything is made for them.
  count(items) {
    this.items += items;
    if (items > LIST_MAX || this.items > this.limits.items) throw new CodecError('a list or map has too many items');
    if (items > this.bytes.length - this.at) throw new CodecError('a list or map has more items than bytes');
    return items;
  }

  read(around) {
    if (around > this.limits.around) throw new CodecError('a value is nested too deep');
    const first = this.number(1);
    if (first < 0x80) return first;
    if (first < 0x90) return this.map(first & 15, around);
    if (first < 0xa0) return this.list(first & 15, around);
    if (first < 0xc0) return this.text(first & 31);
    if (first >= 0xe0) return first - 256;
    switch (first) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return this.take(this.number(1 << (first - 0xc4)));
      case 0xc7: case 0xc8: case 0xc9: return this.extension(this.number(1 << (first - 0xc7)), around);
      case 0xca: return this.take(4).readFloatBE();
      case 0xcb: return this.take(8).readDoubleBE();
      case 0xcc: case 0xcd: case 0xce: return this.number(1 << (first - 0xcc));
      case 0xcf: return small(this.take(8).readBigUInt64BE());
      case 0xd0: return this.take(1).readInt8();
      case 0xd1: return this.take(2).readInt16BE();
      case 0xd2: return this.take(4).readInt32BE();
      case 0xd3: return small(this.take(8).readBigInt64BE());
      case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8: return this.extension(1 << (first - 0xd4), around);
      case 0xd9: case 0xda: case 0xdb: return this.text(this.number(1 << (first - 0xd9)));
      case 0xdc: case 0xdd: return this.list(this.number(first === 0xdc ? 2 : 4), around);
      case 0xde: case 0xdf: return this.map(this.number(first === 0xde ? 2 : 4), around);
      default: throw new CodecError('a byte is no msgpack');
    }
  }

  text(length) {
    if (length > TEXT_MAX) throw new CodecError('a text is too long');
    return decodeText(this.take(length));
  }

  list(length, around) {
    const items = [];
    for (let left = this.count(length); left > 0; left--) items.push(this.read(around + 1));
    return items;
  }

  map(length, around) {
    this.count(2 * length);
    const map = Object.create(null);
    for (let index = 0; index < length; index++) {
      const key = this.read(around + 1);
      if (typeof key !== 'string') throw new CodecError('the key of a map is no text');
      map[key] = this.read(around + 1);
    }
    return map;
  }

  // The map of msgpack_numpy, whose four keys are bin.
  description() {
    const fields = {};
    if (this.number(1) !== 0x84) throw new CodecError('an array has another head');
    for (let index = 0; index < 4; index++) {
      const key = this.read(1);
      if (!(key instanceof Uint8Array)) throw new CodecError('an array has another head');
      fields[key.toString('latin1')] = this.read(1);
    }
    if (this.at !== this.bytes.length) throw new CodecError('an array has another head');
    return fields;
  }

  array(name, data) {
    const end = 1 + data[0];
    const { nd, type: dtype, kind, shape } = new Reader(data.subarray(1, end), this.limits).description();
    if (nd !== true || kind?.length !== 0 || !Array.isArray(shape) || shape.length > 16) {
      throw new CodecError(`a ${name} has another head`);
    }
    if (name === 'SCALAR' && shape.length > 0) throw new CodecError('a SCALAR has dimensions');
    const bytes = data.subarray(end);
    if (/[USmM]/.test(dtype)) return new Extension(name, texts(dtype, shape, bytes));
    return name === 'ARRAY' ? new NDArray(dtype, shape, bytes) : new NDScalar(dtype, bytes);
  }

  extension(length, around) {
    const code = this.number(1);
    const name = EXTENSIONS[code];
    const data = this.take(length);
    if (this.limits.header && (name !== 'INTEGER' || length > 128)) throw new CodecError('an extension in a header');
    const packed = () => new Reader(data, this.limits).whole(around + 1);
    const list = (size) => {
      const items = packed();
      if (!Array.isArray(items) || (size && items.length !== size)) throw new CodecError(`a ${name} has another form`);
      return items;
    };
    const few = (items) => { // a bound of the document, as of a sender that knows how keys are looked up
      if (items.filter((item) => typeof item !== 'string' && !(item instanceof Uint8Array)).length > 4096) {
        throw new CodecError(`a ${name} is too large`);
      }
      return items;
    };
    switch (name) {
      case 'TUPLE': return Tuple.from(list());
      case 'SET': return new Set(few(list()));
      case 'FROZENSET': return new FrozenSet(few(list()));
      case 'INTEGER': return integer(data.toString('latin1'));
      case 'COMPLEX': {
        if (length !== 16) throw new CodecError('a COMPLEX has another length');
        return new Complex(data.readDoubleLE(0), data.readDoubleLE(8));
      }
      case 'MAPPING': {
        const items = list();
        if (items.length % 2) throw new CodecError('a MAPPING has a key without a value');
        few(items.filter((_, index) => index % 2 === 0));
        return new Map(Array.from({ length: items.length / 2 }, (_, index) => items.slice(2 * index, 2 * index + 2)));
      }
      case 'GENERATOR': return new Extension(name, generator(list(2)));
      case 'ARRAY': case 'SCALAR': return this.array(name, data);
      case 'REPR': return decodeText(data);
      case 'GRAPH': return new Extension(name, list(3));
      case 'SPEC': case 'SPACE': {
        const map = packed();
        if (!isMap(map)) throw new CodecError(`a ${name} has another form`);
        return new Extension(name, map);
      }
      default: throw new CodecError(`an extension that is refused: ${code}`);
    }
  }
}

function small(number) {
  return BigInt(Number(number)) === number && Number.isSafeInteger(Number(number)) ? Number(number) : number;
}

function integer(text) {
  if (!/^-?0x[0-9a-f]+$/.test(text)) throw new CodecError('an INTEGER has another form');
  return text.startsWith('-') ? -BigInt(text.slice(1)) : BigInt(text);
}

// The positions are indices, which NumPy does not check. A state is passed back to Python only, but is checked all the same.
function generator([name, state]) {
  const limits = { MT19937: ['state', 'pos', 624], Philox: [null, 'buffer_pos', 4], PCG64: [], PCG64DXSM: [], SFC64: [] };
  if (!Object.hasOwn(limits, name) || !isMap(state)) throw new CodecError('a GENERATOR has another form');
  const [inner, field, largest] = limits[name];
  if (field) {
    const position = (inner ? state[inner] : state)?.[field];
    if (!Number.isSafeInteger(position) || position < 0 || position > largest) throw new CodecError('a position is out of its state');
  }
  return [name, state];
}

// Arrays of text, bytes and times stay bytes here. Their form and their code points are checked.
function texts(dtype, shape, bytes) {
  const match = typeof dtype === 'string' && /^[<>|=]?(?:([US])(\d{1,9})|[mM]8(?:\[\w+\])?)$/.exec(dtype);
  if (!match || match[2] === '0') throw new CodecError('an ARRAY has another form');
  const size = match[1] ? Number(match[2]) * (match[1] === 'U' ? 4 : 1) : 8;
  if (sizeOf(shape) * size !== bytes.length) throw new CodecError('an ARRAY has other bytes than items');
  for (let at = 0; match[1] === 'U' && at < bytes.length; at += 4) {
    const point = dtype.startsWith('>') ? bytes.readUInt32BE(at) : bytes.readUInt32LE(at);
    if (point > 0x10ffff) throw new CodecError('a code point over 0x10ffff');
  }
  return [dtype, shape, bytes];
}

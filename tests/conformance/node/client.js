// A client of the EnvHub protocol 1, of the levels "basic", "resilient" and "parts". It was written from
// PROTOCOL.md alone, to show that the document is enough. The sections that comments name are those of the document.

import crypto from 'node:crypto';
import fs from 'node:fs';
import net from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import { Dealer } from 'zeromq';
import { CodecError, isMap, pack, unpack, unpackHeader } from './codec.js';
import { OUT_OF_BAND, Space, packRows, unpackRows } from './spaces.js';

export * from './codec.js';

const OP = {
  HELLO: 1, HEARTBEAT: 6, MAKE: 16, RESET: 17, STEP: 18, CALL: 19, SET_ATTR: 20, CLOSE: 21, SEND: 23, RECEIVE: 24,
  GOODBYE: 65, NOTICE: 66, FAILURE: 127,
};
const REPLY = 128;
const PRELUDE = 40;
const NO_TOKEN = Buffer.alloc(16);

// Times are in milliseconds. They are those of "Limits" where the document has them.
const BEAT = 1000; // a pending request is asked after when nothing was sent for so long
const TICK = 100; // how often the clock is looked at
const REFUSED_MAX = 5000;
const UNREACHED_MAX = 60000;
const WARN_UNCONNECTED = 300;
const WARN_SILENT = 3500;
const ENDS_MAX = 10; // connections in a row that end after the request was sent on them
// "What a refused client sees": the address has another key after two rows of three broken handshakes, each with a probe.
const BROKEN_MAX = 3;
const BROKEN_ROWS_MAX = 2;
const BROKEN_WITHIN = 1500;
const PROBE_GREETING = 3000; // for the hub's greeting
const PROBE_OPEN = 500; // for which the hub then leaves the connection open
const FRAMES_MAX = 1024;
const HEADER_MAX = 65536;
const TIMEOUT = 600; // seconds; the caller's own limit of a request, unless it says another

// --- Errors ---------------------------------------------------------------------------------------------------------

/** The hub refused a request, or it failed. `code`, `scope`, `envIndex` and the rest are those of "Failures". */
export class Failure extends Error {
  constructor(header) {
    super(`${clean(header.code)}: ${clean(header.message)}`);
    this.code = clean(header.code);
    this.scope = clean(header.scope);
    this.envIndex = header.env_index ?? null;
    this.worker = header.worker ?? null;
    this.type = clean(header.type);
    this.traceback = clean(header.traceback);
    this.logTail = clean(header.log_tail);
    this.replay = clean(header.replay);
  }
}

/** The hub is gone, and its sessions with it. */
export class HubLost extends Error {}

/** The caller's time was over, or the request ended ten connections in a row. It may still run. */
export class GivenUp extends Error {}

// A hub's texts may reach a terminal, where control characters do harm.
function clean(text) {
  return String(text ?? '').replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, '\ufffd');
}

function cleanAll(value) {
  if (typeof value === 'string') return clean(value);
  if (Array.isArray(value)) return value.map(cleanAll);
  if (isMap(value)) for (const key of Object.keys(value)) value[key] = cleanAll(value[key]);
  return value;
}

// --- Addresses ------------------------------------------------------------------------------------------------------

/** A key's 32 bytes as Z85, the form that libzmq takes. */
export function z85(bytes) {
  const digits = '0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#';
  let text = '';
  for (let at = 0; at < bytes.length; at += 4) {
    const number = bytes.readUInt32BE(at);
    for (let power = 85 ** 4; power >= 1; power /= 85) text += digits[Math.floor(number / power) % 85];
  }
  return text;
}

/** The public key of a secret key: X25519, for which Node wants the key in its DER form. */
export function publicKey(secret) {
  const der = Buffer.concat([Buffer.from('302e020100300506032b656e04220420', 'hex'), secret]);
  const key = crypto.createPublicKey(crypto.createPrivateKey({ key: der, format: 'der', type: 'pkcs8' }));
  return Buffer.from(key.export({ format: 'jwk' }).x, 'base64url');
}

/** `envhub://TOKEN@HOST:PORT`, `tcp://HOST:PORT` or `ipc://PATH`: the address to connect to, and the options of its keys. */
export function parseAddress(address) {
  const ipv6 = /^\w+:\/\/([^@]*@)?\[/.test(address);
  if (!address.startsWith('envhub://')) return { address, options: { ipv6 } };
  const match = /^envhub:\/\/([A-Za-z0-9_-]{86})@(.+:\d+)$/.exec(address);
  if (!match) throw new TypeError('an address of the form envhub://TOKEN@HOST:PORT is due'); // the text holds a secret
  const keys = Buffer.from(match[1], 'base64url');
  const secret = keys.subarray(32);
  return {
    address: `tcp://${match[2]}`,
    options: {
      ipv6, curveServerKey: z85(keys.subarray(0, 32)), curveSecretKey: z85(secret), curvePublicKey: z85(publicKey(secret)),
    },
  };
}

// An ipc socket of another user is not connected to. A path can mean another socket after the check, so the connection goes
// through a descriptor of the socket that was checked. When a hub binds the path anew, this client takes the hub for lost
// instead of opening the path again: its sessions ended with it.
function openSocketFile(address) {
  const O_PATH = 0o10000000;
  const descriptor = fs.openSync(address.slice('ipc://'.length), O_PATH);
  if (fs.fstatSync(descriptor).uid !== process.getuid()) {
    fs.closeSync(descriptor);
    throw new Error('the ipc socket belongs to another user');
  }
  return descriptor;
}

// --- The connection -------------------------------------------------------------------------------------------------

function prelude(op, hub, token, seq) {
  const bytes = Buffer.alloc(PRELUDE);
  bytes.write('EHUB', 0, 'latin1');
  bytes.set([1, 0, op], 4);
  bytes.writeBigUInt64LE(hub, 8);
  bytes.set(token, 16);
  bytes.writeBigUInt64LE(seq, 32);
  return bytes;
}

/**
 * One connection to a hub, with one request at a time: "Order of a connection", "The client's part".
 *
 * It sends only while it is connected, so that a message is either on its way or known to be unsent.
 */
class Link {
  token = NO_TOKEN; // the session's
  lost = null; // why no request is possible any more
  #hub = 0n;
  #seq = 0n; // of the session's last request
  #messageMax = 67108864;
  #socket;
  #descriptor = null; // of the ipc socket
  #timer;
  #warn;
  #warned = false;
  #noticed = false;
  #pending = null;
  #givenUp = null; // the session's request that was given up, until it is known not to run
  #late = false; // whether a copy of such a request may still arrive, which the hub then runs first
  #sending = Promise.resolve();
  #unsent = 0; // messages that ZeroMQ has not taken yet
  #sentAt = 0;
  #heardAt = 0;
  #connected = false;
  #unconnectedSince = Date.now();
  #refusedSince = null;
  #connectedAt = 0;
  #broken = 0; // handshakes in a row that the hub has ended at once
  #brokenRows = 0;

  constructor(address, warn) {
    const { address: target, options } = parseAddress(address);
    this.#warn = warn;
    if (target.startsWith('ipc://')) this.#descriptor = openSocketFile(target);
    this.#socket = new Dealer({
      linger: 0, maxMessageSize: 2 ** 30, sendHighWaterMark: 16, receiveHighWaterMark: 0, heartbeatInterval: 1000,
      heartbeatTimeout: 2000, heartbeatTimeToLive: 4000, handshakeInterval: 3000, reconnectInterval: 20,
      reconnectMaxInterval: 500, ...options,
    });
    const { events } = this.#socket;
    events.on('connect', () => { this.#refusedSince = null; this.#connectedAt = Date.now(); });
    events.on('close', () => { this.#refusedSince ??= Date.now(); }); // an attempt that found nobody
    events.on('handshake', () => this.#onConnected());
    events.on('disconnect', () => this.#onDisconnected());
    events.on('handshake:error:auth', () => this.lose(new Error('the hub does not know the key of this client')));
    events.on('handshake:error:protocol', () => this.lose(new Error('either the hub has keys or the address has, not both')));
    // Without a key it says nothing: libzmq will see in one of the next handshakes that the mechanisms differ.
    if (options.curveServerKey) events.on('handshake:error:other', ({ error }) => this.#onBroken(target, error));
    this.#socket.connect(this.#descriptor === null ? target : `ipc:///proc/self/fd/${this.#descriptor}`);
    this.#timer = setInterval(() => this.#tick(), TICK);
    this.#timer.unref(); // an idle client does not keep its program from ending
    this.#receive();
  }

  /** Learns the hub's id and its limits. */
  async hello(timeout) {
    const { header } = await this.#ask({ op: OP.HELLO, token: NO_TOKEN, seq: 1n, timeout });
    const limit = header.limits?.message_bytes_max;
    if (Number.isSafeInteger(limit)) this.#messageMax = Math.min(this.#messageMax, limit);
    return header;
  }

  /** Asks a request of the session. `header` is a map, or the raw bytes of a STEP. Resolves with `{ header, frames }`. */
  async request(op, header, { frames = [], timeout = TIMEOUT } = {}) {
    const end = Date.now() + timeout * 1000;
    if (this.#givenUp !== null && op !== OP.CLOSE) await this.#settle(end);
    return this.#ask({ op, header, frames, token: this.token, seq: ++this.#seq, timeout: Math.max(0, end - Date.now()) / 1000 });
  }

  close() {
    clearInterval(this.#timer);
    this.lose(new Error('the client is closed'));
    this.#socket.close();
    if (this.#descriptor !== null) fs.closeSync(this.#descriptor);
    this.#descriptor = null;
  }

  /** Ends the pending request, and every later one, with an error. */
  lose(error) {
    this.lost ??= error;
    this.#finish(null, error);
  }

  #ask({ op, header = {}, frames = [], token, seq, timeout }) {
    if (this.lost) return Promise.reject(this.lost);
    if (this.#pending) return Promise.reject(new Error('another request is pending'));
    const raw = header instanceof Uint8Array;
    const packed = raw ? header : pack(header);
    // What breaks these limits would end the connection without a reply, or is refused.
    const bins = raw ? 0 : Object.values(header).flat().reduce((sum, item) => sum + (item instanceof Uint8Array ? item.length : 0), 0);
    if (packed.length - bins > HEADER_MAX) return Promise.reject(new RangeError('the header of the request is too large'));
    const message = [Buffer.concat([prelude(op, this.#hub, token, seq), packed]), ...frames];
    if (message.length > FRAMES_MAX || message.some((frame) => frame.length > this.#messageMax)) {
      return Promise.reject(new RangeError('the request has a frame that is too large for the hub, or too many frames'));
    }
    return new Promise((resolve, reject) => {
      this.#pending = {
        op, token, seq, message, resolve, reject, end: Date.now() + timeout * 1000, session: op >= OP.MAKE, sent: false, sentHere: false,
        refused: false, ends: 0,
      };
      this.#heardAt = Date.now();
      this.#warned &&= !this.#connected;
      if (this.#connected) this.#sendPending();
    });
  }

  #finish(reply, error) {
    const pending = this.#pending;
    this.#pending = null;
    if (error) pending?.reject(error);
    else pending?.resolve(reply);
  }

  #giveUp(why) {
    if (this.#pending.session && this.#pending.sent) {
      this.#givenUp = this.#pending;
      this.#late = true;
    }
    this.#finish(null, new GivenUp(why));
  }

  // Waits until the request that was given up no longer runs.
  async #settle(end) {
    for (let asked = 0; this.#givenUp; await sleep(TICK / 4)) {
      if (this.lost) throw this.lost;
      if (Date.now() > end) throw new GivenUp('a request that was given up still runs');
      if (this.#connected && Date.now() - asked >= BEAT) {
        asked = Date.now();
        this.#beat(this.#givenUp.token, this.#givenUp.seq);
      }
    }
  }

  // --- What is sent

  #send(message) {
    this.#sentAt = Date.now();
    this.#unsent += 1;
    // ZeroMQ's promise waits while the hub reads nothing. Two at once are an error in zeromq.js.
    this.#sending = this.#sending.then(() => this.#socket.send(message)).catch((error) => {
      if (!this.#socket.closed) this.lose(error);
    }).finally(() => { this.#unsent -= 1; });
  }

  #sendPending() {
    Object.assign(this.#pending, { sent: true, sentHere: true, refused: false });
    this.#send(this.#pending.message);
  }

  #beat(token, seq) {
    // Heartbeats that pile up say nothing more than the first.
    if (this.#unsent === 0) this.#send([Buffer.concat([prelude(OP.HEARTBEAT, this.#hub, token, seq), pack({})])]);
  }

  // Asks after the pending request: a session's by HEARTBEAT once it was sent, another by sending it again.
  #askAfter() {
    const { session, sent, refused, token, seq } = this.#pending;
    if (session && sent && !refused) this.#beat(token, seq);
    else if (this.#unsent === 0) this.#sendPending();
  }

  // --- What happens to the connection

  async #onBroken(target, error) {
    const atOnce = ['EPIPE', 'ECONNRESET'].includes(error?.code) && Date.now() - this.#connectedAt < BROKEN_WITHIN;
    this.#broken = atOnce ? this.#broken + 1 : 0;
    if (this.#broken < BROKEN_MAX) return;
    this.#broken = 0;
    this.#brokenRows = (await staysOpen(target)) ? this.#brokenRows + 1 : 0;
    if (this.#brokenRows === BROKEN_ROWS_MAX) {
      this.lose(new Error("the hub ends each handshake: the address has another key than the hub's"));
    }
  }

  #onConnected() {
    this.#connected = true;
    this.#broken = this.#brokenRows = 0;
    this.#heardAt = Date.now();
    this.#warned = false;
    if (this.#pending) this.#askAfter();
    else if (this.#hub !== 0n) this.#beat(this.token, this.token === NO_TOKEN ? 0n : this.#seq);
  }

  #onDisconnected() {
    if (this.#connected) this.#unconnectedSince = Date.now();
    this.#connected = false;
    const pending = this.#pending;
    if (!pending?.sentHere) return;
    pending.sentHere = false;
    pending.ends += 1;
    if (pending.ends >= ENDS_MAX && pending.op !== OP.HELLO) this.#giveUp('the connection ended ten times after the request was sent');
  }

  #tick() {
    const now = Date.now();
    const pending = this.#pending;
    const silent = this.#connected ? (pending ? now - this.#heardAt : 0) : now - this.#unconnectedSince;
    if (silent > (this.#connected ? WARN_SILENT : WARN_UNCONNECTED) && !this.#warned) {
      this.#warned = true;
      this.#warn(this.#connected ? 'The hub is silent.' : 'There is no connection to the hub.');
    }
    // A hub may be starting while HELLO waits. There the caller's time decides alone.
    if (this.#hub !== 0n) {
      if (!this.#connected && this.#refusedSince !== null && now - this.#refusedSince > REFUSED_MAX) {
        this.lose(new HubLost('the hub refuses connections'));
      } else if (pending && silent > UNREACHED_MAX) this.lose(new HubLost('the hub is out of reach, or silent'));
    }
    if (!this.#pending) return;
    if (now > pending.end) this.#giveUp("no reply came within the caller's time");
    else if (this.#connected && now - this.#sentAt >= BEAT) this.#askAfter();
  }

  // --- What is received

  async #receive() {
    try {
      for await (const frames of this.#socket) this.#onMessage(frames);
    } catch (error) {
      this.lose(error);
    }
  }

  #onMessage(frames) {
    const first = frames[0];
    if (first.length < PRELUDE || first.toString('latin1', 0, 4) !== 'EHUB') return;
    const op = first[6];
    // A refusal can be read in every version. Nothing else of another version can.
    if (first[4] !== 1 && op !== OP.FAILURE + REPLY) return;
    const hub = first.readBigUInt64LE(8);
    const token = first.subarray(16, 32);
    const seq = first.readBigUInt64LE(32);
    this.#heardAt = Date.now();
    this.#warned = false;
    if (this.#hub !== 0n && hub !== this.#hub) {
      this.lose(new HubLost('another hub has taken the place of the hub'));
      return;
    }
    const is = (request) => request !== null && request.seq === seq && request.token.equals(token);
    try {
      if (op < REPLY) this.#onPush(op, token, first);
      else if (is(this.#pending)) this.#onReply(op, hub, frames);
      else if (is(this.#givenUp) && !(op === OP.HEARTBEAT + REPLY && stateOf(first) === 'running')) this.#givenUp = null;
    } catch (error) {
      this.#finish(null, error); // the hub broke the protocol
    }
  }

  #onPush(op, token, first) {
    if (token.equals(NO_TOKEN) || !token.equals(this.token)) return; // as PING, which wants no answer
    const header = unpackHeader(first.subarray(PRELUDE));
    if (op === OP.GOODBYE) this.lose(Object.assign(new HubLost(new Failure(header).message), { code: clean(header.code) }));
    if (op === OP.NOTICE && !this.#noticed) {
      this.#noticed = true;
      this.#warn(clean(header.text));
    }
  }

  #onReply(op, hub, frames) {
    const pending = this.#pending;
    const bytes = frames[0].subarray(PRELUDE);
    if (op === OP.HEARTBEAT + REPLY && pending.session) {
      if (stateOf(frames[0]) === 'running') pending.ends = 0;
      else if (this.#unsent === 0) this.#sendPending();
    } else if (op === OP.FAILURE + REPLY) {
      const failure = new Failure(unpackHeader(bytes));
      if (this.#late && failure.code === 'bad_seq') {
        pending.refused = true; // the late copy runs: the same message is sent again after a second
        return;
      }
      if (pending.session) this.#late = false;
      const gone = failure.code === 'stale_hub' || failure.code === 'draining';
      if (gone) this.lose(Object.assign(new HubLost(failure.message), { code: failure.code }));
      else this.#finish(null, failure);
    } else if (op === pending.op + REPLY && frames.length <= FRAMES_MAX) {
      if (pending.op === OP.HELLO) this.#hub = hub;
      if (pending.session) this.#late = false; // the hub begins no earlier request any more
      this.#finish({ header: bytes.length > 0 ? unpackHeader(bytes) : null, frames: frames.slice(1) }, null);
    } else this.#finish(null, new CodecError('the hub answers something else'));
  }
}

// Whether a hub with a key listens and waits for the HELLO of a handshake, which is not sent. A hub that stops does not wait.
function staysOpen(target) {
  const [, host, port] = /^tcp:\/\/\[?(.+?)\]?:(\d+)$/.exec(target);
  const greeting = Buffer.alloc(64);
  greeting.set([0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3]);
  greeting.write('CURVE', 12, 'latin1');
  return new Promise((resolve) => {
    const socket = net.connect(Number(port), host);
    const end = (open) => { clearTimeout(timer); socket.destroy(); resolve(open); };
    let timer = setTimeout(end, PROBE_GREETING, false);
    let read = Buffer.alloc(0);
    socket.on('connect', () => socket.write(greeting)).on('error', () => end(false)).on('close', () => end(false));
    socket.on('data', (data) => {
      const isNew = read.length < greeting.length;
      read = Buffer.concat([read, data]).subarray(0, greeting.length);
      if (!isNew || read.length < greeting.length) return;
      clearTimeout(timer);
      if (read.toString('latin1', 12, 32) !== 'CURVE'.padEnd(20, '\0')) end(false);
      else timer = setTimeout(end, PROBE_OPEN, true);
    });
  });
}

function stateOf(first) {
  return unpackHeader(first.subarray(PRELUDE)).state;
}

// --- The session ----------------------------------------------------------------------------------------------------

/**
 * A vector env on a hub.
 *
 * `reset` and `step` resolve with `observations` (see Space.assemble: NDArrays with `data`, `shape` and `dtype`), `infos` (an
 * object per env, which may be empty), and `step` with `rewards` (Float64Array), `terminations` and `truncations` (Uint8Array)
 * too. A reward with axes is in `rewardArrays` under its row.
 */
export class VectorEnv {
  #link;
  #plan;
  #last = null; // the last observations of object leaves, for rows that come without

  /**
   * Options: `kwargs` (of the env), `make` (further fields of Make, such as `num_workers` or `autoreset_mode`), `timeout` (of
   * each request, in seconds), `helloTimeout`, and `warn` (gets texts for the user).
   */
  static async make(address, id, numEnvs, options = {}) {
    const env = new VectorEnv();
    env.#plan = {
      address, id, numEnvs, kwargs: null, make: {}, timeout: TIMEOUT, helloTimeout: 10,
      warn: (text) => process.emitWarning(text), ...options,
    };
    await env.#open();
    return env;
  }

  async #open() {
    const { address, id, numEnvs, kwargs, make, timeout, helloTimeout, warn } = this.#plan;
    const link = new Link(address, warn);
    try {
      this.welcome = await link.hello(helloTimeout);
      link.token = crypto.randomBytes(16); // whoever knows it can use the session, so it is never shown
      const header = { num_envs: numEnvs, name: id, ...(kwargs && { kwargs: pack(kwargs) }), ...make };
      const { header: made } = await link.request(OP.MAKE, header, { timeout }).catch(async (error) => {
        // A MAKE that was given up may still run. CLOSE ends it, also if it comes later.
        if (error instanceof GivenUp) await link.request(OP.CLOSE, {}, { timeout: 5 }).catch(() => {});
        throw error;
      });
      if (made?.num_envs !== numEnvs || !Array.isArray(made.observation_spaces)) throw new CodecError('a Made of another form');
      this.observationSpace = new Space(made.observation_spaces[0], numEnvs);
      this.actionSpace = new Space(made.action_space, numEnvs);
    } catch (error) {
      link.close();
      throw error;
    }
    this.numEnvs = numEnvs;
    this.#link = link;
  }

  /** `seeds`: a number for the first env, from which the others count, or a list with a number or null per env. */
  async reset(seeds = null, { options = null, mask = [] } = {}) {
    const list = typeof seeds === 'number' ? Array.from({ length: this.numEnvs }, (_, row) => seeds + row) : (seeds ?? []);
    const header = { seeds: list, mask, ...(options && { options: pack(options) }) };
    return this.#batch(await this.#request(OP.RESET, header), this.numEnvs, false, null, mask);
  }

  /** `timeout`, in seconds, is instead of that of the session. */
  async step(actions, { timeout } = {}) {
    const { codes, frames, values } = this.actionSpace.encode(actions, this.numEnvs);
    if (values) frames.push(packRows(values));
    return this.#batch(await this.#request(OP.STEP, codes, frames, timeout), this.numEnvs, true);
  }

  /** Calls a method of each env, or of `rows`, or reads an attribute. Resolves with a list of the results. */
  async call(name, args = [], kwargs = {}, { rows = [] } = {}) {
    const { frames } = await this.#request(OP.CALL, { name, args: pack([args, kwargs]), rows });
    if (frames.length !== 1) throw new CodecError('a CALL has another number of frames');
    return [...unpackRows(frames[0], this.numEnvs).values()].map((bytes) => (bytes.length > 0 ? unpack(bytes) : null));
  }

  /** Sets an attribute: `values` has one value for all envs, or one per env. */
  async setAttr(name, values) {
    await this.#request(OP.SET_ATTR, { name, values: values.map(pack) });
  }

  /** "Parts of a batch": hands `actions`, which has an item per row of `rows`, to these envs. */
  async send(rows, actions) {
    const { codes, frames } = this.actionSpace.encode(actions, rows.length);
    if (codes.includes(OUT_OF_BAND)) throw new TypeError('actions of this space do not go in parts');
    await this.#request(OP.SEND, { rows, codes }, frames);
  }

  /** Resolves once `minEnvs` of the rows that were sent are done: as `step`, of the rows in `rows`. */
  async receive(minEnvs = 1) {
    const { frames } = await this.#request(OP.RECEIVE, { min_envs: minEnvs });
    const numbers = frames.shift() ?? Buffer.alloc(0);
    const rows = Array.from({ length: numbers.length / 8 }, (_, index) => Number(numbers.readBigInt64LE(8 * index)));
    if (rows.length === 0 || rows.some((row, index) => row >= this.numEnvs || row <= (rows[index - 1] ?? -1))) {
      throw new CodecError('the rows of a RECEIVE do not ascend');
    }
    return { rows, ...this.#batch({ frames }, rows.length, true, rows) };
  }

  /** Ends the session and the connection. */
  async close({ terminate = false, timeout = 30 } = {}) {
    try {
      if (!this.#link.lost) await this.#link.request(OP.CLOSE, { terminate }, { timeout });
    } catch (error) {
      if (error.code !== 'session_lost' && !(error instanceof HubLost)) throw error; // these have ended it as well
    } finally {
      this.#link.close();
    }
  }

  #request(op, header, frames, timeout = this.#plan.timeout) {
    return this.#link.request(op, header, { frames, timeout });
  }

  // The frames of a reply to RESET, STEP or RECEIVE. `count` rows are in it, whose numbers are `rows`.
  #batch({ frames }, count, results, rows = null, mask = []) {
    const { fixed, objects, leaves } = this.observationSpace;
    const due = fixed.length + (results ? 1 : 0);
    if (frames.length !== due && (frames.length !== due + 1 || frames.length === 0)) throw new CodecError('a reply of another number of frames');
    const entries = frames.length > due ? unpackRows(frames[due], this.numEnvs) : new Map();
    const arrays = this.observationSpace.decode(frames, count);
    const infos = [];
    const values = objects.map(() => []);
    const rewardArrays = {};
    for (let index = 0; index < count; index++) {
      const row = rows ? rows[index] : index;
      let bytes = entries.get(row);
      if (objects.length > 0) {
        if (!bytes) throw new CodecError('a row has no entry');
        const [observed, info] = unpack(bytes);
        // A truncated row's may be empty: its last observation remains.
        const list = observed.length > 0 ? unpack(observed) : objects.map((_, leaf) => this.#last?.[leaf][row] ?? null);
        values.forEach((column, leaf) => column.push(list[leaf]));
        bytes = info;
      }
      const info = bytes?.length > 0 ? unpack(bytes) : {};
      if (info.env_failure) info.env_failure = cleanAll(info.env_failure);
      if (info.envhub_vector_reward) {
        rewardArrays[index] = info.envhub_vector_reward;
        delete info.envhub_vector_reward;
      }
      infos.push(info);
    }
    if (objects.length > 0) {
      this.#last ??= objects.map(() => []);
      values.forEach((column, leaf) => column.forEach((value, index) => { this.#last[leaf][rows ? rows[index] : index] = value; }));
    }
    const observations = this.observationSpace.assemble(leaves.map((leaf) => (leaf.object ? values[objects.indexOf(leaf)] : arrays[fixed.indexOf(leaf)])));
    if (!results) return { observations, infos };
    const frame = new Uint8Array(frames[due - 1]); // a copy, whose buffer begins with it
    if (frame.length !== count * 10) throw new CodecError('a frame of results has another length');
    return {
      observations, infos, rewardArrays, rewards: new Float64Array(frame.buffer, 0, count),
      terminations: frame.subarray(8 * count, 9 * count), truncations: frame.subarray(9 * count),
    };
  }
}

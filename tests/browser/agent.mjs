// A simulated agent: it speaks the protocol but trains nothing, for pages with more data than a test can produce by training.
// It runs in its own browser page, as it needs only a websocket and MessagePack.

import { until } from "./test-server.mjs";

/** Runs in the page and defines `window.Agent`. */
function inPage() {
  const encoder = new TextEncoder(), decoder = new TextDecoder();

  /** Encodes a JSON-like value as MessagePack: whole numbers as integers, other numbers as float32. */
  function encode(value) {
    let bytes = new Uint8Array(1 << 16), offset = 0;
    const reserve = (n) => {
      if (offset + n <= bytes.length) return;
      const larger = new Uint8Array(Math.max(bytes.length * 2, offset + n));
      larger.set(bytes);
      bytes = larger;
    };
    const view = () => new DataView(bytes.buffer);
    /** Writes a type and a length `n`: as one byte of type `small` if `n` is below `limit`, otherwise as type `wide` with 32 bits. */
    const head = (small, limit, wide, n) => {
      reserve(5);
      if (n < limit) bytes[offset++] = small | n;
      else { bytes[offset++] = wide; view().setUint32(offset, n); offset += 4; }
    };
    const put = (v) => {
      reserve(16);
      if (v === null || v === undefined) bytes[offset++] = 0xc0;
      else if (typeof v === "boolean") bytes[offset++] = v ? 0xc3 : 0xc2;
      else if (typeof v === "number" && Number.isInteger(v) && v >= 0) {
        if (v < 128) bytes[offset++] = v;
        else { bytes[offset++] = 0xcf; view().setBigUint64(offset, BigInt(v)); offset += 8; }
      } else if (typeof v === "number") { bytes[offset++] = 0xca; view().setFloat32(offset, v); offset += 4; }
      else if (typeof v === "string") { const t = encoder.encode(v); head(0xa0, 32, 0xdb, t.length); reserve(t.length); bytes.set(t, offset); offset += t.length; }
      else if (Array.isArray(v)) { head(0x90, 16, 0xdd, v.length); for (const x of v) put(x); }
      else { const e = Object.entries(v); head(0x80, 16, 0xdf, e.length); for (const [k, x] of e) { put(k); put(x); } }
    };
    put(value);
    return bytes.slice(0, offset);
  }

  function decode(buffer) {
    const view = new DataView(buffer);
    let offset = 0;
    const string = (n) => { const t = decoder.decode(new Uint8Array(buffer, offset, n)); offset += n; return t; };
    const list = (n) => Array.from({ length: n }, get);
    const map = (n) => Object.fromEntries(Array.from({ length: n }, () => [get(), get()]));
    const number = (read, size) => { const v = Number(view[read](offset)); offset += size; return v; };
    function get() {
      const b = view.getUint8(offset++);
      if (b < 0x80) return b;
      if (b < 0x90) return map(b & 15);
      if (b < 0xa0) return list(b & 15);
      if (b < 0xc0) return string(b & 31);
      if (b >= 0xe0) return b - 256;
      switch (b) {
        case 0xc0: return null;
        case 0xc2: return false;
        case 0xc3: return true;
        case 0xca: return number("getFloat32", 4);
        case 0xcb: return number("getFloat64", 8);
        case 0xcc: return number("getUint8", 1);
        case 0xcd: return number("getUint16", 2);
        case 0xce: return number("getUint32", 4);
        case 0xcf: return number("getBigUint64", 8);
        case 0xd0: return number("getInt8", 1);
        case 0xd1: return number("getInt16", 2);
        case 0xd2: return number("getInt32", 4);
        case 0xd3: return number("getBigInt64", 8);
        case 0xd9: return string(number("getUint8", 1));
        case 0xda: return string(number("getUint16", 2));
        case 0xdb: return string(number("getUint32", 4));
        case 0xdc: return list(number("getUint16", 2));
        case 0xdd: return list(number("getUint32", 4));
        case 0xde: return map(number("getUint16", 2));
        case 0xdf: return map(number("getUint32", 4));
        default: throw new Error(`MessagePack 0x${b.toString(16)}`);
      }
    }
    return get();
  }

  const key = (attempt, source) => `${attempt.fencing_token}:${JSON.stringify(source)}`;

  class Agent {
    started = [];
    // Numbers of records that were sent and that the server has stored, by attempt and source.
    #sent = new Map();
    #stored = new Map();
    #waiting = [];

    /** `gpus`: whether the slots are reported as GPUs, or as CPU cores. */
    constructor(slots, info, gpus = false) {
      const socket = this.socket = new WebSocket(`ws://${location.host}/api/v1/agent/socket`);
      socket.binaryType = "arraybuffer";
      this.ready = new Promise((done, failed) => { this.markReady = done; socket.onclose = (e) => failed(new Error(`closed: ${e.code} ${e.reason}`)); });
      socket.onopen = () => this.say({
        type: "hello", protocol: 6, agent_id: "simulated", name: "simulated", attempts: [], only_job: null,
        machine: { hostname: "simulated", cpu: "none", cores: slots, memory_bytes: 1e9, disk_free_bytes: 1e9, version: "0" },
        slots: Array.from({ length: slots }, (_, index) => (gpus
          ? { index, device: "cuda", name: "a made-up GPU", memory_bytes: 80e9, uuid: `GPU-made-up-${index}` } : { index, device: "cpu", name: "a made-up core", memory_bytes: 0 })),
      });
      socket.onmessage = ({ data }) => this.#hear(decode(data), info);
    }

    say(message) { this.socket.send(encode(message)); }

    #hear(message, info) {
      if (message.type === "welcome") {
        this.markReady();
        setInterval(() => this.say({ type: "heartbeat", attempts: this.started.map((s) => s.attempt) }), message.heartbeat_secs * 1000);
      } else if (message.type === "request" && message.request.type === "samples") this.say({ type: "reply", id: message.id, reply: { Ok: { type: "samples", total: 0, classes: info.classes, samples: [] } } });
      else if (message.type === "request") this.say({ type: "reply", id: message.id, reply: { Ok: { type: "dataset", path: message.request.path, info } } });
      else if (message.type === "start") this.started.push(message);
      else if (message.type === "ack") { this.#stored.set(key(message.attempt, message.source), message.records); this.#waiting.splice(0).forEach((tell) => tell()); }
    }

    /** Waits until the server has started attempt number `n` of a job, and returns the attempt. */
    async attempt(job, n = 1) {
      for (;;) {
        const found = this.started.filter((s) => s.attempt.job === job)[n - 1];
        if (found) return found.attempt;
        await new Promise((done) => setTimeout(done, 20));
      }
    }

    /** Sends records of a rank. Resolves when the server has stored them. */
    async report(attempt, rank, events) {
      const source = { rank }, k = key(attempt, source), first = this.#sent.get(k) ?? 0;
      this.#sent.set(k, first + events.length);
      this.say({ type: "report", attempt, source, first, events });
      while ((this.#stored.get(k) ?? 0) < first + events.length) await new Promise((done) => this.#waiting.push(done));
    }
  }
  window.Agent = Agent;
}

/** Reproducible noise from 0 to 1. */
export const noise = (n) => { const x = Math.sin(n * 12.9898) * 43758.5453; return x - Math.floor(x); };
/** A falling loss with noise, and a peak every 99,991 steps. */
export const loss = (step, rank) => 2.3 * Math.exp(-step / 3e5) + 0.25 + 0.2 * noise(step * 8 + rank) + (step % 99_991 === 0 ? 1 : 0);
/** The whole numbers `from` to `to`. */
export const range = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => from + i);
/** The record of a rank's metrics at `steps`. `values`: for each metric, a number or a function of the step. */
export const metrics = (rank, steps, values) => ({
  type: "metrics", rank, columns: Object.entries(values).map(([name, value]) => ({ name, steps, values: steps.map((step) => (typeof value === "function" ? value(step) : value)) })),
});

/** An agent's report of its measurements. `cpuShare`: utilisation of the CPU. `gpus`: measurements of each slot. */
export const machineSample = (cpuShare, gpus) => ({
  type: "sample", at: new Date().toISOString(), cpus: 8, host_cpus: 64, cpu_utilization: cpuShare, load: 3.5, memory_used_bytes: 3e9, memory_bytes: 64e9, host_memory_bytes: 256e9,
  disk_used_bytes: 97e9, disk_bytes: 100e9, disk_read_bytes_per_second: 5e6, disk_written_bytes_per_second: 12e6, network_received_bytes_per_second: 1e6, network_sent_bytes_per_second: 2e6, gpus,
});

const INFO = {
  format: "idx", classes: ["a", "b"], height: 8, width: 8, channels: 1, mean: [0.5], std: [0.25], broken: [], broken_count: 0,
  splits: [{ name: "train", samples: 60_000, per_class: [30_000, 30_000] }, { name: "test", samples: 100, per_class: [50, 50] }],
};

/** Joins `server` with `slots` simulated slots and registers the dataset `made-up`. Returns the page in which the agent runs, with calls of
 *  the agent as methods. */
export async function simulateAgent(browser, server, slots, { gpus = false } = {}) {
  // A page's script cannot set headers of a websocket, but each request of the context has the context's headers.
  const secret = server.token && (await server.ask("/tokens", { name: `made-up ${Date.now()}`, scope: "agent", agent: "simulated" })).secret;
  const context = await browser.newContext(secret ? { extraHTTPHeaders: { authorization: `Bearer ${secret}` } } : {});
  const page = await context.newPage();
  // Any file of the server: the agent's websocket must have the server's origin.
  await page.goto(`${server.url}/static/icon.svg`);
  await page.evaluate(inPage);
  await page.evaluate(([n, info, gpus]) => { window.simulatedAgent = new window.Agent(n, info, gpus); return window.simulatedAgent.ready; }, [slots, INFO, gpus]);
  page.attempt = (job, n = 1) => page.evaluate(([job, n]) => window.simulatedAgent.attempt(job, n), [job, n]);
  page.report = (attempt, rank, events) => page.evaluate(([attempt, rank, events]) => window.simulatedAgent.report(attempt, rank, events), [attempt, rank, events]);
  page.say = (message) => page.evaluate((message) => window.simulatedAgent.say(message), message);
  /** Reports that the ranks of an attempt train. */
  page.begin = (attempt, { total_steps = 1000, steps_per_epoch = 100, start_step = 0, ...fields } = {}) => page.report(attempt, 0, [{ type: "running", total_steps, steps_per_epoch, start_step, ...fields }]);
  /** Reports a rank's metrics: see `metrics`. */
  page.reportSteps = (attempt, rank, steps, values) => page.report(attempt, rank, [metrics(rank, steps, values)]);
  /** Ends an attempt, and waits until the server has stored the end. `ended`: fields of the event, such as `{ how: "stopped" }`. */
  page.endAttempt = async (attempt, ended) => {
    await page.say({ type: "report", attempt, source: "agent", first: 0, events: [{ type: "ended", ...ended }] });
    await until("the attempt has ended", async () => (await server.ask(`/jobs/${attempt.job}/attempts`)).attempts.find((a) => a.attempt === attempt.attempt).ended_at !== null);
  };
  const isRegistered = (await server.ask("/datasets")).datasets.some((d) => d.name === "made-up");
  if (!isRegistered) await server.ask("/datasets", { name: "made-up", path: "/made-up" });
  return page;
}

/** The specification of a job on the simulated dataset. */
export const spec = (name, ranks, steps) => ({
  name, model: { arch: "resnet20" }, data: { dataset: "made-up" }, train: { steps, batch_size: 8 }, parallel: { ranks, device: "cpu" },
  checkpoint: { every_epochs: 0 }, evaluate: { every_epochs: 0 },
});

// A websocket that reconnects and never shows an event twice.
//
// Every event of a job has a sequence number. A new connection requests the events after the last received event, so no event is missing or
// duplicated, however often the connection breaks.

import { suspectConnections, signIn } from "./page.js";

const FIRST_DELAY_MS = 250;
const LONGEST_DELAY_MS = 10_000;
/**
 * Time without a frame after which a connection counts as lost, even if the browser does not report it: two heartbeats, which the server
 * sends every 20 s, are missing.
 */
const SILENT_MS = 45_000;
/**
 * If the timer fires `LATE_MS` after its last call, the machine has slept or the page is in the background. The connection then counts as lost
 * after a silence of `SILENT_AND_LATE_MS`, in which one heartbeat is missing.
 */
const LATE_MS = 15_000, SILENT_AND_LATE_MS = 25_000;
/** Interval at which the silence is checked. */
const CHECK_INTERVAL_MS = 5000;

export class Stream {
  #socket = null;
  #timer = 0;
  #delay = FIRST_DELAY_MS;
  #isClosed = false;
  #silenceTimer = 0;
  #onOnline = null;
  /** Time of the newest frame, or of the connection's start. */
  #heardAt = 0;

  /**
   * `path(seq)`: URL for events after `seq`. `onFrame(frame)`: called for each frame, without duplicate events.
   * `onStatus(status)`: called with `live` or `reconnecting`. `onGone()`: called when a connection closes before its first frame; the
   * stream stops if it returns true or a promise of true.
   */
  constructor({ path, seq = 0, onFrame, onStatus, onGone }) {
    Object.assign(this, { path, seq, onFrame, onStatus, onGone });
    this.#open();
    let lastTick = Date.now();
    this.#silenceTimer = setInterval(() => {
      const now = Date.now(), silentMs = now - this.#heardAt;
      if (this.#socket && silentMs > (now - lastTick > LATE_MS ? SILENT_AND_LATE_MS : SILENT_MS)) { suspectConnections(); this.reconnect(); }
      lastTick = now;
    }, CHECK_INTERVAL_MS);
    addEventListener("online", this.#onOnline = () => this.reconnect());
  }

  #open() {
    clearTimeout(this.#timer);
    if (this.#isClosed) return;
    const url = new URL(this.path(this.seq), location.href);
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    const socket = this.#socket = new WebSocket(url);
    let hasFrame = false;
    this.#heardAt = Date.now();
    socket.onmessage = ({ data }) => {
      if (socket !== this.#socket) return;
      hasFrame = true;
      this.#heardAt = Date.now();
      this.#delay = FIRST_DELAY_MS;
      const frame = JSON.parse(data);
      if (frame.type === "heartbeat") return;
      if (frame.seq !== undefined && frame.type !== "live") {
        if (frame.seq <= this.seq) return;
        this.seq = frame.seq;
      }
      this.onFrame(frame);
      if (frame.type === "live") this.onStatus("live");
    };
    socket.onclose = async (event) => {
      if (socket !== this.#socket || this.#isClosed) return;
      // 4401: the session has ended.
      if (event.code === 4401) { this.close(); return signIn(); }
      this.onStatus("reconnecting");
      // 4008: this client was too slow. The store has the missing events, so the connection is opened again soon.
      if (event.code === 4008) this.#delay = FIRST_DELAY_MS;
      else if (!hasFrame && await this.onGone?.()) return this.close();
      if (socket !== this.#socket) return;
      // A random factor, so that not all pages reconnect at the same time.
      this.#timer = setTimeout(() => this.#open(), this.#delay * (0.75 + Math.random() / 2));
      this.#delay = Math.min(LONGEST_DELAY_MS, this.#delay * 2);
    };
  }

  /** Opens a new connection now, with events after `seq`. */
  reconnect(seq = this.seq) {
    if (this.#isClosed) return;
    this.seq = seq;
    this.disconnect();
    this.#delay = FIRST_DELAY_MS;
    this.onStatus("reconnecting");
    this.#open();
  }

  /** Closes the connection. `reconnect` opens a new connection. */
  disconnect() {
    const old = this.#socket;
    this.#socket = null;
    clearTimeout(this.#timer);
    old?.close();
  }

  close() {
    this.#isClosed = true;
    clearTimeout(this.#timer);
    clearInterval(this.#silenceTimer);
    removeEventListener("online", this.#onOnline);
    this.#socket?.close();
  }
}

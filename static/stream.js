// A websocket that comes back by itself and never shows an event twice.
//
// Every event of a job has a sequence number; a reconnect asks for those after the last one seen, so
// nothing is missing and nothing doubled, however often the line breaks.

import { doubt, signIn } from "./page.js";

const FIRST_DELAY_MS = 250;
const LONGEST_DELAY_MS = 10_000;
/** The server sends a heartbeat every 20 s: after two without one the connection is dead, and the browser was not notified. */
const SILENT_MS = 45_000;
/** A timer this late means that the machine slept, or that the page is in the background: one missing heartbeat is enough then. */
const LATE_MS = 15_000, SILENT_AND_LATE_MS = 25_000;

export class Stream {
  #socket = null;
  #timer = 0;
  #delay = FIRST_DELAY_MS;
  #closed = false;
  #pulse = 0;
  #online = null;
  /** When the newest frame came, or the connection was begun. */
  #heard = 0;

  /**
   * `path(seq)`: address for what comes after `seq`. `onFrame(frame)`: each frame, events already
   * deduplicated. `onStatus("live" | "reconnecting" | "behind")`. `onGone()`: asked when a connection is
   * refused; return true to stop trying.
   */
  constructor({ path, seq = 0, onFrame, onStatus, onGone }) {
    Object.assign(this, { path, seq, onFrame, onStatus, onGone });
    this.#open();
    let beat = Date.now();
    this.#pulse = setInterval(() => {
      const now = Date.now(), silent = now - this.#heard;
      if (this.#socket && silent > (now - beat > LATE_MS ? SILENT_AND_LATE_MS : SILENT_MS)) { doubt(); this.reconnect(); }
      beat = now;
    }, 5000);
    addEventListener("online", this.#online = () => this.reconnect());
  }

  #open() {
    clearTimeout(this.#timer);
    if (this.#closed) return;
    const url = new URL(this.path(this.seq), location.href);
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    const socket = this.#socket = new WebSocket(url);
    let opened = false;
    this.#heard = Date.now();
    socket.onmessage = ({ data }) => {
      if (socket !== this.#socket) return;
      opened = true;
      this.#heard = Date.now();
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
      if (socket !== this.#socket || this.#closed) return;
      // 4401: the session is over.
      if (event.code === 4401) { this.close(); return signIn(); }
      this.onStatus("reconnecting");
      // 4008: this reader fell behind; the store has what it missed, so come back at once.
      if (event.code === 4008) this.#delay = FIRST_DELAY_MS;
      else if (!opened && await this.onGone?.()) return this.close();
      if (socket !== this.#socket) return;
      this.#timer = setTimeout(() => this.#open(), this.#delay * (0.75 + Math.random() / 2));
      this.#delay = Math.min(LONGEST_DELAY_MS, this.#delay * 2);
    };
  }

  /** Starts afresh from `seq`, now. */
  reconnect(seq = this.seq) {
    if (this.#closed) return;
    this.seq = seq;
    const old = this.#socket;
    this.#socket = null;
    old?.close();
    this.#delay = FIRST_DELAY_MS;
    this.onStatus("reconnecting");
    this.#open();
  }

  /** Reads no further until `reconnect`. */
  hold() {
    const old = this.#socket;
    this.#socket = null;
    clearTimeout(this.#timer);
    old?.close();
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
    clearInterval(this.#pulse);
    removeEventListener("online", this.#online);
    this.#socket?.close();
  }
}

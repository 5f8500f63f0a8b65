// The states of jobs, and the actions that apply to a job.

const FINAL = ["succeeded", "failed", "cancelled"], ACTIVE = ["starting", "running", "pausing"];

export const isFinal = (state) => FINAL.includes(state);

/** Whether a job in this state has slots. */
export const isActive = (state) => ACTIVE.includes(state);

/** The state for a person: `ended early` for a trial that its sweep has ended. The same as `state_in_words` in protocol/src/job.rs. */
export const stateWords = ({ state, cause }) => (state === "cancelled" && cause?.code === "ended_by_sweep" ? "ended early" : state);

/** Whether a job waits in the queue. */
export const isWaiting = ({ state }) => ["queued", "restarting"].includes(state);

/** For each action, whether the action applies to a job. A trial at a rung is resumed by its sweep. */
export const APPLIES = {
  pause: ({ state }) => ["queued", "running"].includes(state), resume: ({ state, cause }) => state === "paused" && cause?.code !== "paused_by_sweep",
  retry: ({ state }) => ["failed", "cancelled"].includes(state), cancel: ({ state }) => !isFinal(state), delete: ({ state }) => isFinal(state),
};

// The board in the browser: what the event stream told, by kind and key, and who wants to know of changes.

const kinds = new Map();
const listeners = new Set();
const linkListeners = new Set();
let changed = new Set();
let scheduled = false;

/** Return the values of a kind, by key. */
export function all(kind) {
  if (!kinds.has(kind)) kinds.set(kind, new Map());
  return kinds.get(kind);
}

/** Return the only value of a kind, or undefined. */
export function one(kind) {
  return all(kind).get("");
}

/** Call `listener` with the kinds that changed, at most once in a frame; returns what ends that. */
export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Call `listener` with true when the stream lives, and false when it is lost. */
export function listenLink(listener) {
  linkListeners.add(listener);
}

/** Take one event of the stream: [kind, key, value or null] each; a whole one replaces all. */
export function take({ whole, values }) {
  if (whole) {
    for (const [kind, map] of kinds) { map.clear(); changed.add(kind); }
  }
  for (const [kind, key, value] of values) {
    if (value === null) all(kind).delete(key);
    else all(kind).set(key, value);
    changed.add(kind);
  }
  if (scheduled) return;
  scheduled = true;
  // A hidden page draws no frames, and need not.
  requestAnimationFrame(() => {
    scheduled = false;
    const told = changed;
    changed = new Set();
    for (const listener of listeners) listener(told);
  });
}

/** Open the stream. The browser opens it again by itself, and says which event it has seen last. */
export function open() {
  const stream = new EventSource("/api/events");
  stream.addEventListener("message", (event) => take(JSON.parse(event.data)));
  stream.addEventListener("open", () => linkListeners.forEach((listener) => listener(true)));
  stream.addEventListener("error", () => {
    linkListeners.forEach((listener) => listener(false));
    if (stream.readyState === EventSource.CLOSED) setTimeout(open, 3000);  // the server refused: try anew
  });
  addEventListener("pagehide", () => stream.close());
}

// At most one update of the screen in this time, in ms: more often, a list cannot be read.
const pause = 100;

const due = new Set<() => void>();
let waiting = false;
let last = 0;

function run() {
  waiting = false;
  last = performance.now();
  const now = [...due];
  due.clear();
  for (const update of now) update();
}

/**
 * schedule calls an update in a following animation frame, once, however often it is
 * asked to. A hidden page has no frames, so its updates wait until it is seen.
 */
export function schedule(update: () => void) {
  due.add(update);
  if (waiting) return;
  waiting = true;
  const frame = () => requestAnimationFrame(run);
  const left = last + pause - performance.now();
  if (left > 0) setTimeout(frame, left);
  else frame();
}

/** Source notifies those that show it, in an animation frame. */
export class Source {
  private readers = new Set<() => void>();
  private notify = () => {
    for (const reader of this.readers) reader();
  };

  subscribe(reader: () => void): () => void {
    this.readers.add(reader);
    return () => this.readers.delete(reader);
  }

  changed() {
    if (this.readers.size > 0) schedule(this.notify);
  }
}

import { explain } from "./api";
import { Source } from "./schedule";

/** longest is the longest pause for a value that is slow to read, in ms. */
const longest = 30_000;

/**
 * Poll reads a value again and again while it is shown, with a pause of so many ms at least. It
 * reads during no more than a share of its time, so a value that is slow to read is read less often,
 * but each half minute at least.
 */
export class Poll<T> extends Source {
  value: T | undefined;
  error = "";
  /** at is when the value was read, in ms; 0: never. */
  at = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private shows = 0;
  private took = 0;
  private reading = false;

  constructor(
    private readonly read: () => Promise<T>,
    private readonly pause: number,
    private readonly share = 0.1,
  ) {
    super();
  }

  override subscribe(reader: () => void): () => void {
    const end = super.subscribe(reader);
    if (this.shows++ === 0) this.begin();
    return () => {
      end();
      if (--this.shows === 0) clearTimeout(this.timer);
    };
  }

  private begin() {
    clearTimeout(this.timer);
    const left = this.at + this.rest - Date.now();
    if (this.at > 0 && left > 0) this.timer = setTimeout(() => void this.again(), left);
    else void this.again();
  }

  /** again reads now. */
  async again() {
    if (this.reading) return;
    this.reading = true;
    clearTimeout(this.timer);
    const began = Date.now();
    try {
      this.value = await this.read();
      this.error = "";
    } catch (error) {
      this.error = explain(error);
    }
    this.at = Date.now();
    this.took = this.at - began;
    this.reading = false;
    this.changed();
    clearTimeout(this.timer);
    if (this.shows > 0) this.timer = setTimeout(() => void this.again(), this.rest);
  }

  /** rest is the pause between two readings, in ms. */
  private get rest() {
    return Math.max(this.pause, Math.min(this.took / this.share - this.took, longest));
  }

  get busy() {
    return this.reading;
  }
}

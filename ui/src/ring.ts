/** Ring keeps the latest items, up to a limit. */
export class Ring<T> {
  private items: T[] = [];
  private next = 0;
  /** total counts all items that were ever added. */
  total = 0;

  constructor(readonly limit: number) {}

  get length() {
    return this.items.length;
  }

  push(item: T) {
    if (this.items.length < this.limit) this.items.push(item);
    else this.items[this.next] = item;
    this.next = (this.next + 1) % this.limit;
    this.total++;
  }

  clear() {
    this.items = [];
    this.next = 0;
    this.total = 0;
  }

  /** latest returns the item that has i newer ones. */
  latest(i: number): T | undefined {
    if (i < 0 || i >= this.items.length) return undefined;
    return this.items[(this.next - 1 - i + 2 * this.limit) % this.limit];
  }

  /** newestFirst returns the items that match, up to a number. */
  newestFirst(match: (item: T) => boolean = () => true, most = this.limit): T[] {
    const found: T[] = [];
    for (let i = 0; i < this.items.length && found.length < most; i++) {
      const item = this.latest(i)!;
      if (match(item)) found.push(item);
    }
    return found;
  }
}

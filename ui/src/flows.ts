import { create } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { timestampFromMs } from "@bufbuild/protobuf/wkt";
import { explain, refused } from "./api";
import type { NodeClient } from "./api";
import { EventKind, FlowFilterSchema, WatchFlowsRequestSchema } from "./gen/spillway/node/v1alpha1/node_pb";
import type { FlowEvent, FlowFilter } from "./gen/spillway/node/v1alpha1/node_pb";
import { Ring } from "./ring";
import { Source } from "./schedule";

/** Entry is an event with its number in the order of arrival. */
export interface Entry {
  id: number;
  event: FlowEvent;
}

/** most is how many events a Watch keeps. */
export const most = 5_000;

/** Watch follows the events that a filter selects, and keeps the latest. */
export class Watch extends Source {
  readonly entries = new Ring<Entry>(most);
  /** bad has the refused and dropped ones, which others do not push out. */
  readonly bad = new Ring<Entry>(500);
  /** missed counts events that the agents dropped because the page was too slow. */
  missed = 0n;
  /** error is why there are no events; "" while connected. */
  error = "";
  connected = false;
  /** from is the time of the first event that it asked for, in ms. */
  from = 0;
  private stop = new AbortController();

  constructor(private readonly onEvent: (event: FlowEvent) => void = () => {}) {
    super();
  }

  /** start follows events until close. since is how far back it begins, in ms. */
  start(client: NodeClient, filter: MessageInitShape<typeof FlowFilterSchema>, since = 0) {
    this.close();
    this.stop = new AbortController();
    this.from = Date.now() - since;
    void this.run(client, create(FlowFilterSchema, filter), since, this.stop.signal);
  }

  close() {
    this.stop.abort();
  }

  clear() {
    this.entries.clear();
    this.bad.clear();
    this.changed();
  }

  take(events: FlowEvent[]) {
    for (const event of events) {
      const entry = { id: this.entries.total, event };
      this.entries.push(entry);
      if (event.kind === EventKind.REFUSED || event.kind === EventKind.DROPPED) this.bad.push(entry);
      this.onEvent(event);
    }
    this.changed();
  }

  private async run(client: NodeClient, filter: FlowFilter, since: number, signal: AbortSignal) {
    for (let wait = 1000; !signal.aborted; wait = Math.min(2 * wait, 15_000)) {
      try {
        const request = create(WatchFlowsRequestSchema, { filter });
        if (since > 0 && this.entries.length === 0) request.since = timestampFromMs(Date.now() - since);
        for await (const message of client.watchFlows(request, { signal, timeoutMs: 0 })) {
          if (!this.connected) {
            this.connected = true;
            this.error = "";
            wait = 1000;
          }
          this.missed += message.missed;
          this.take(message.events);
        }
      } catch (error) {
        if (signal.aborted) return;
        const old = ConnectError.from(error).code === Code.Unimplemented;
        this.error = old ? "This agent has no live events: it is older than the page, or does not follow flows." : explain(error);
        this.connected = false;
        this.changed();
        if (refused(error)) return;
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}

import { EventKind, Protocol } from "./gen/spillway/node/v1alpha1/node_pb";
import type { Flow, FlowEvent } from "./gen/spillway/node/v1alpha1/node_pb";
import { timestampMs } from "@bufbuild/protobuf/wkt";
import { flowService, hostPort, milliseconds, short } from "./text";

/** seconds is how long a Service's rates are kept. */
export const seconds = 60;

/** Limits of what is kept, however many names events have. */
export const limits = { services: 10_000, edges: 4_000, failing: 500, nodes: 100 };

/** Counts are numbers of events in each of the last seconds. */
export class Counts {
  private buckets: Uint32Array;
  private newest = 0;

  constructor(readonly length: number) {
    this.buckets = new Uint32Array(length);
  }

  private advance(second: number) {
    if (second <= this.newest) return;
    const gap = Math.min(second - this.newest, this.length);
    for (let i = 1; i <= gap; i++) this.buckets[(second - gap + i) % this.length] = 0;
    this.newest = second;
  }

  add(second: number, n = 1) {
    this.advance(second);
    if (second > this.newest - this.length) this.buckets[second % this.length]! += n;
  }

  /** series returns the counts of the seconds before second, the oldest first. */
  series(second: number, length = this.length): number[] {
    this.advance(second);
    const out = new Array<number>(length);
    for (let i = 0; i < length; i++) {
      const at = second - length + i;
      out[i] = at > this.newest - this.length && at >= 0 ? this.buckets[at % this.length]! : 0;
    }
    return out;
  }

  /** rate is the mean in a second, over the last complete seconds. */
  rate(second: number, over = 10): number {
    let sum = 0;
    for (const n of this.series(second, Math.min(over, this.length - 1))) sum += n;
    return sum / over;
  }
}

/** Half is the time in seconds after which an old event counts half. */
const half = 5;

/** Decaying is a sum whose parts count less with their age. */
class Decaying {
  private value = 0;
  private at = 0;

  /** add counts n parts of a time, which may be older than those before. */
  add(time: number, n = 1) {
    this.value = this.now(time) + n * 2 ** (Math.min(time - this.at, 0) / half);
    this.at = Math.max(time, this.at);
  }

  now(time: number): number {
    return time <= this.at ? this.value : this.value * 2 ** ((this.at - time) / half);
  }

  rate(time: number): number {
    return (this.now(time) * Math.LN2) / half;
  }
}

/** shortest is the end of the first bucket of Handshakes in ms, and ratio the factor between two ends. */
const shortest = 2 ** -10;
const steps = 8;
const ratio = 2 ** (1 / steps);

/** Handshakes counts times in buckets of a factor of 1.09, from 1 µs to 32 s. */
export class Handshakes {
  private buckets = new Float32Array(25 * steps + 1);
  private sum = 0;
  private at = 0;

  add(second: number, time: number) {
    this.fade(second);
    const bucket = Math.min(Math.max(Math.ceil(steps * Math.log2(time / shortest)), 0), this.buckets.length - 1);
    this.buckets[bucket]!++;
    this.sum++;
  }

  private fade(second: number) {
    if (second <= this.at) return;
    const factor = 2 ** ((this.at - second) / 15);
    this.at = second;
    this.sum = 0;
    for (let i = 0; i < this.buckets.length; i++) this.sum += this.buckets[i]! *= factor;
  }

  /** quantile is in ms; undefined without handshakes of late. */
  quantile(q: number): number | undefined {
    return quantile(this.buckets, q, shortest, ratio);
  }
}

/**
 * quantile estimates a quantile of counts in buckets, of which bucket i ends at first·factor^i.
 * It is interpolated within its bucket.
 */
export function quantile(buckets: ArrayLike<number>, q: number, first: number, factor = 2): number | undefined {
  let total = 0;
  for (let i = 0; i < buckets.length; i++) total += buckets[i]!;
  if (total < 0.5) return undefined;
  let left = q * total;
  for (let i = 0; i < buckets.length; i++) {
    const n = buckets[i]!;
    if (n > 0 && left <= n) {
      const end = first * factor ** i;
      const begin = i === 0 ? 0 : end / factor;
      return begin + (end - begin) * (left / n);
    }
    left -= n;
  }
  return first * factor ** (buckets.length - 1);
}

/** Failure is how a connection failed. */
export type Failure = "silent" | "reset" | "refused" | "dropped";

export class ServiceTraffic {
  opened = new Counts(seconds + 1);
  bad = new Counts(seconds + 1);
  /** failed has the counts of bad by how they failed, if some did. */
  failed: Partial<Record<Failure, Counts>> = {};
  handshakes = new Handshakes();
}

/** Edge is a way of connections on the map: client group, Service, endpoint. */
export interface Edge {
  from: string;
  service: string;
  to: string;
  opened: Decaying;
  bad: Decaying;
}

/** Failing is an endpoint that did not answer connections, or that reset them at once. */
export class Failing {
  failed = new Decaying();
  /** accepted counts connections that it accepted since it first failed. */
  accepted = new Decaying();
  nodes = new Set<string>();

  constructor(readonly how: "silent" | "reset", readonly service: string, readonly endpoint: string, readonly pod: string) {}

  /** fails reports that it failed more often than not of late. One RST may be a client's fault; a lost answer is not. */
  fails(second: number): boolean {
    const failed = this.failed.now(second);
    return failed >= (this.how === "silent" ? 0.8 : 2) && failed >= this.accepted.now(second);
  }
}

/** clientGroup is where a client belongs on the map. */
export function clientGroup(pod: string, node: string): string {
  if (pod) return `pods of ${pod.slice(0, Math.max(pod.indexOf("/"), 0)) || pod}`;
  return node ? `on ${node}` : "outside the cluster";
}

/** Traffic sums events up. Its size does not depend on how many there are. */
export class Traffic {
  totals = { opened: new Counts(121), refused: new Counts(121), dropped: new Counts(121), all: new Counts(121) };
  handshakes = new Handshakes();
  services = new Map<string, ServiceTraffic>();
  edges = new Map<string, Edge>();
  /** failing has endpoints by their Service, address and how they fail. */
  failing = new Map<string, Failing>();
  /** skipped counts events of Services beyond the limit. */
  skipped = 0;

  /** add counts an event of a second of the page's own clock. */
  add(event: FlowEvent, second: number) {
    const flow = event.flow;
    this.totals.all.add(second);
    if (!flow) return;
    const key = flowService(flow);
    let service = this.services.get(key);
    if (!service) {
      if (this.services.size >= limits.services) {
        this.skipped++;
        return;
      }
      this.services.set(key, (service = new ServiceTraffic()));
    }
    switch (event.kind) {
      case EventKind.OPENED:
        this.totals.opened.add(second);
        service.opened.add(second);
        this.edge(event, second, false);
        break;
      case EventKind.ANSWERED:
        if (flow.handshake) {
          const time = milliseconds(flow.handshake);
          this.handshakes.add(second, time);
          service.handshakes.add(second, time);
        }
        for (const how of ["silent", "reset"]) this.failing.get(failingKey(flow, how))?.accepted.add(second);
        break;
      case EventKind.CLOSED:
      case EventKind.REFUSED:
      case EventKind.DROPPED:
        this.close(event, service, second);
        break;
    }
  }

  /** close counts the end of a flow, and its failure. */
  private close(event: FlowEvent, service: ServiceTraffic, second: number) {
    const how = failure(event);
    if (!how) return;
    if (how === "refused" || how === "dropped") this.totals[how].add(second);
    else this.fail(event.flow!, how, second);
    service.bad.add(second);
    (service.failed[how] ??= new Counts(seconds + 1)).add(second);
    this.edge(event, second, true);
  }

  private edge(event: FlowEvent, second: number, bad: boolean) {
    const flow = event.flow!;
    const from = clientGroup(flow.client?.pod ?? "", flow.client?.node ?? "");
    const to = flow.endpoint ? flow.endpoint.pod || hostPort(flow.endpoint.address, flow.endpoint.port) : "";
    const service = flowService(flow);
    const key = JSON.stringify([from, service, to]);
    let edge = this.edges.get(key);
    if (!edge) {
      if (this.edges.size >= limits.edges) weakest(this.edges, (e) => e.opened.now(second) + e.bad.now(second));
      this.edges.set(key, (edge = { from, service, to, opened: new Decaying(), bad: new Decaying() }));
    }
    edge[bad ? "bad" : "opened"].add(second);
  }

  private fail(flow: Flow, how: "silent" | "reset", second: number) {
    const key = failingKey(flow, how);
    let failing = this.failing.get(key);
    if (!failing) {
      if (this.failing.size >= limits.failing) weakest(this.failing, (f) => f.failed.now(second));
      failing = new Failing(how, flowService(flow), hostPort(flow.endpoint!.address, flow.endpoint!.port), flow.endpoint!.pod);
      this.failing.set(key, failing);
    }
    if (flow.node && failing.nodes.size < limits.nodes) failing.nodes.add(flow.node);
    failing.failed.add(second);
  }
}

function failingKey(flow: Flow, how: string): string {
  return JSON.stringify([flowService(flow), flow.endpoint?.address, flow.endpoint?.port, how]);
}

/** failure is how the connection of an event failed; undefined: it did not. */
export function failure(event: FlowEvent): Failure | undefined {
  if (event.kind === EventKind.REFUSED) return "refused";
  if (event.kind === EventKind.DROPPED) return "dropped";
  if (wasReset(event)) return "reset";
  return unanswered(event) ? "silent" : undefined;
}

/** wasReset reports that the endpoint answered the first packet of a connection with an RST. */
export function wasReset(event: FlowEvent): boolean {
  const flow = event.flow;
  if (event.kind !== EventKind.CLOSED || event.reason !== "RST" || flow?.protocol !== Protocol.TCP || !flow.endpoint || flow.handshake) return false;
  // A client may send the RST itself, when it has waited for an answer in vain.
  const counted = flow.packetsToEndpoint > 0n && !flow.bySocket;
  return counted ? flow.packetsToClient === 1n : flow.packetsToClient <= 1n;
}

/** unanswered reports that the endpoint of a flow never answered. */
export function unanswered(event: FlowEvent): boolean {
  const flow = event.flow;
  return (
    event.kind === EventKind.CLOSED &&
    !!flow?.endpoint &&
    !flow.handshake &&
    flow.protocol !== Protocol.UNSPECIFIED &&
    flow.packetsToClient === 0n &&
    (flow.packetsToEndpoint > 0n || event.reason === "timeout")
  );
}

/** weakest deletes the weaker half of a map. */
function weakest<T>(map: Map<string, T>, weight: (item: T) => number) {
  const sorted = [...map].sort((a, b) => weight(a[1]) - weight(b[1]));
  for (const [key] of sorted.slice(0, Math.ceil(sorted.length / 2))) map.delete(key);
}

/**
 * eventSecond is the second of an event by the page's clock, which is ahead of the node's clock
 * by some ms. A page that opens gets the events of the last minute at once.
 */
export function eventSecond(event: FlowEvent, now: number, ahead = 0): number {
  const age = event.time ? now - ahead - timestampMs(event.time) : 0;
  return Math.floor((now - Math.max(age, 0)) / 1000);
}

/** Reported is since which second of the page all flows have events (Infinity: not yet), or why that is not so. */
export interface Reported {
  since: number;
  /** why is "" if flows are reported. */
  why: "" | "turning on" | "not known";
  /** partial: some nodes report no flows. */
  partial: boolean;
}

/** notReported explains why flows are not known. */
export const notReported = "The agent reports no new flows. Give it --flow-events on-demand.";

/** rateSeconds is how many seconds a rate needs. */
export const rateSeconds = 5;

/**
 * reported sums up what nodes report, by a page that counts since a second. Of each node it takes the mode,
 * and when it turned events on by the page's clock, in ms; 0: it has not.
 */
export function reported(nodes: { mode: string; since: number }[], from: number, second: number): Reported {
  const out: Reported = { since: from, why: "", partial: false };
  let turning = nodes.length === 0;
  let known = 0;
  for (const n of nodes) {
    if (n.mode === "on-demand" && n.since === 0) turning = true;
    else if (n.mode === "on-demand") out.since = Math.max(out.since, Math.ceil(n.since / 1000));
    if (n.mode === "on-demand" || n.mode === "all") known++;
  }
  out.partial = known < nodes.length;
  if (turning || known === 0) out.since = Infinity;
  if (turning || (known > 0 && second - out.since < rateSeconds)) out.why = "turning on";
  else if (known === 0) out.why = "not known";
  return out;
}

/** rateText is a rate of flows, or why it is unknown. */
export function rateText(rate: number, is: Reported): string {
  return is.why || (is.partial ? `≥ ${short(rate)}` : short(rate));
}

/** knownOnly replaces counts of flows by null before they are known. */
export function knownOnly(times: number[], counts: number[], is: Reported): (number | null)[] {
  return counts.map((n, i) => (n > 0 || times[i]! >= is.since ? n : null));
}

/** nowSecond is the second of the page's clock. */
export function nowSecond(): number {
  return Math.floor(Date.now() / 1000);
}

import { timestampMs } from "@bufbuild/protobuf/wkt";
import { Api, explain } from "./api";
import type { NodeClient, NodeInfo } from "./api";
import { Watch } from "./flows";
import type { Drop, Finding, Problem, Service, StatusResponse } from "./gen/spillway/node/v1alpha1/node_pb";
import { Poll } from "./poll";
import { Source } from "./schedule";
import { ServiceTable } from "./services";
import { eventSecond, nowSecond, reported, Traffic } from "./traffic";
import type { Reported } from "./traffic";

/** Result is what one node answered to a call. */
export interface Result<T> {
  node: NodeState;
  value?: T;
  error: string;
}

/** NodeState is a node and what it last reported. */
export interface NodeState {
  id: number;
  info: NodeInfo;
  client: NodeClient;
  status?: StatusResponse;
  error: string;
  /** seen is when it last answered, in ms. */
  seen: number;
}

/** nodeName is the name that a node reports, or that it was given. */
export function nodeName(n: NodeState): string {
  return n.status?.node || n.info.name || n.info.address;
}

export interface Dropped extends Drop {
  node: string;
  /** rate is packets in a second since the last reading; undefined at first. */
  rate?: number;
}

/** Cluster holds all that the views show of the selected nodes. */
export class Cluster extends Source {
  readonly api = new Api();
  nodes: NodeState[] = [];
  version = "";
  /** lacks is what the list of nodes lacks, or why it is old. */
  lacks = "";
  /** error is why the program that serves the page does not answer. */
  error = "";
  /** selected is the id of the node to show; -1: all. */
  selected = -1;
  traffic = new Traffic();
  readonly watch = new Watch((event) => {
    const node = event.flow?.node ?? "";
    if (this.shows(node)) this.traffic.add(event, eventSecond(event, Date.now(), this.ahead.get(node)));
  });
  readonly services = new ServiceTable();
  readonly statuses = new Poll(() => this.readStatus(), 2_000);
  readonly serviceList = new Poll(() => this.readServices(), 4_000);
  readonly drops = new Poll(() => this.readDrops(), 3_000);
  /** A reading takes a second in which the agent mostly waits, and the agent limits its cost. */
  readonly findings = new Poll(() => this.call<Findings>((c) => c.findings({})), 1_500, 0.5);
  /** ahead is by how many ms the page's clock is ahead of each node's. */
  private ahead = new Map<string, number>();
  private counted = new Map<string, { packets: bigint; at: number }>();

  /** start loads the nodes, and then follows their flows. */
  start() {
    this.statuses.subscribe(() => {});
  }

  /** follow follows flows, once the clock of a node is known: events have its times. */
  private follow() {
    if (this.watch.from === 0) this.watch.start(this.api.all, {}, 60_000);
  }

  /** select shows one node, or all (-1). */
  select(id: number) {
    this.selected = id;
    this.traffic = new Traffic();
    this.services.clear();
    this.counted.clear();
    this.serviceList.value = undefined;
    this.drops.value = undefined;
    this.findings.value = undefined;
    for (const poll of [this.serviceList, this.drops, this.findings]) if (poll.at > 0) void poll.again();
    this.watch.changed();
    this.changed();
  }

  /** scope has the selected nodes. */
  get scope(): NodeState[] {
    return this.selected < 0 ? this.nodes : this.nodes.filter((n) => n.id === this.selected);
  }

  /** reported is what the selected nodes that answer report of flows. */
  get reported(): Reported {
    const nodes = this.scope.filter((n) => !n.error);
    const modes = nodes.map((n) => {
      const since = n.status?.events?.flowsSince;
      // Before its first answer, a node may report anything.
      return { mode: n.status ? n.status.events?.mode ?? "" : "on-demand", since: since ? timestampMs(since) + (this.ahead.get(nodeName(n)) ?? 0) : 0 };
    });
    return reported(this.watch.connected ? modes : [], Math.ceil(this.watch.from / 1000), nowSecond());
  }

  /** shows reports whether a node is selected, by the name that flows have. */
  shows(node: string): boolean {
    return this.selected < 0 || node === "" || this.scope.some((n) => nodeName(n) === node);
  }

  /** call asks each selected node, several at a time. Nodes that do not answer are not asked. */
  async call<T>(ask: (client: NodeClient) => Promise<T>, nodes = this.scope): Promise<Result<T>[]> {
    const results: Result<T>[] = nodes.map((node) => ({ node, error: node.error }));
    await this.ask(results.filter((r) => !r.error), ask);
    return results;
  }

  private async ask<T>(results: Result<T>[], ask: (client: NodeClient) => Promise<T>, done: (r: Result<T>) => void = () => {}) {
    let next = 0;
    const worker = async () => {
      while (next < results.length) {
        const result = results[next++]!;
        result.error = "";
        try {
          result.value = await ask(result.node.client);
        } catch (error) {
          result.error = explain(error);
        }
        done(result);
      }
    };
    // A browser has six connections; one is the stream's.
    await Promise.all([worker(), worker(), worker()]);
  }

  private async readStatus() {
    try {
      const { nodes, version, lacks } = await this.api.nodes();
      this.version = version;
      this.lacks = lacks;
      this.error = "";
      const known = new Map(this.nodes.map((n) => [n.id, n]));
      this.nodes = nodes.map((info) => Object.assign(known.get(info.id) ?? { id: info.id, client: this.api.node(info.id), error: "", seen: 0 }, { info }));
      if (this.selected >= 0 && this.scope.length === 0) this.select(-1); // it has left the cluster
    } catch (error) {
      this.error = explain(error);
      this.changed();
      throw error;
    }
    const questions = this.nodes.map((node): Result<StatusResponse> => ({ node, error: "" }));
    await this.ask(questions, (c) => c.status({}, { timeoutMs: 5_000 }), (r) => {
      r.node.error = r.error;
      if (r.value) {
        r.node.status = r.value;
        r.node.seen = Date.now();
        if (r.value.time) this.ahead.set(nodeName(r.node), r.node.seen - timestampMs(r.value.time));
        this.follow();
      }
      this.changed();
    });
    this.follow(); // it says why there are no events
    return this.nodes;
  }

  private async readServices() {
    await this.ready();
    const results = await this.call(async (client) => {
      const all: Service[] = [];
      for (let pageToken = ""; ; ) {
        const page = await client.listServices({ pageSize: 500, pageToken });
        all.push(...page.services);
        pageToken = page.nextPageToken;
        if (!pageToken) return all;
      }
    });
    this.services.update(results.flatMap((r) => (r.value ? [{ node: nodeName(r.node), services: r.value }] : [])), Date.now());
    const failed = results.filter((r) => r.error);
    if (failed.length > 0 && failed.length === results.length) throw new Error(failed[0]!.error);
    return results;
  }

  private async readDrops(): Promise<{ drops: Dropped[]; errors: Result<unknown>[] }> {
    await this.ready();
    const results = await this.call((c) => c.drops({}));
    const drops: Dropped[] = [];
    const counted = new Map<string, { packets: bigint; at: number }>();
    const at = Date.now();
    for (const r of results) {
      for (const drop of r.value?.drops ?? []) {
        const node = nodeName(r.node);
        const key = JSON.stringify([node, drop.reason, drop.namespace, drop.service]);
        const before = this.counted.get(key);
        const rate = before && at > before.at && drop.packets >= before.packets ? (Number(drop.packets - before.packets) * 1000) / (at - before.at) : undefined;
        counted.set(key, { packets: drop.packets, at });
        drops.push({ ...drop, node, rate });
      }
    }
    this.counted = counted;
    return { drops, errors: results.filter((r) => r.error) };
  }

  /** ready waits for the first list of nodes. */
  async ready() {
    while (this.nodes.length === 0) await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

interface Findings {
  findings: Finding[];
  problems: Problem[];
}

import type { Cluster } from "./cluster";
import { nodeName } from "./cluster";
import type { Detail, View } from "./context";
import type { Finding } from "./gen/spillway/node/v1alpha1/node_pb";
import { faults, reasonOf, refuses } from "./reasons";
import { count, duration, ms, per, plural } from "./text";
import { nowSecond } from "./traffic";

/** Attention is a fault that the operator should see first, and where it is explained. */
export interface Attention {
  mood: "bad" | "warn";
  what: string;
  why: string;
  /** service is the key of the Service that it is about; "": none. */
  service: string;
  /** nodes are those that report it. */
  nodes: string[];
  view?: View;
  detail?: Detail;
}

/** Group is all that is wrong with a Service, or one fault of nodes. */
export interface Group {
  mood: "bad" | "warn";
  /** service is the key of the Service; "": the list has one fault of nodes. */
  service: string;
  nodes: string[];
  list: Attention[];
}

export function serviceDetail(key: string): Detail {
  const [namespace = "", name = ""] = key.split("/");
  return { kind: "service", namespace, name };
}

/** Faults collects what nodes report. The same fault of several nodes is one. */
class Faults {
  private list = new Map<string, Attention>();

  add(id: string, node: string, a: Omit<Attention, "nodes" | "service"> & { service?: string }) {
    const key = JSON.stringify([a.service ?? "", id]);
    const known = this.list.get(key);
    if (!known) {
      this.list.set(key, { ...a, service: a.service ?? "", nodes: node ? [node] : [] });
      return;
    }
    if (node && !known.nodes.includes(node)) known.nodes.push(node);
    if (known.mood === "warn" && a.mood === "bad") Object.assign(known, a);
  }

  /** groups has a group for each Service and for each fault of nodes, the worst first. */
  groups(): Group[] {
    const groups = new Map<string, Group>();
    let alone = 0;
    for (const a of this.list.values()) {
      const key = a.service || String(alone++);
      const group = groups.get(key) ?? { mood: a.mood, service: a.service, nodes: [], list: [] };
      groups.set(key, group);
      group.list.push(a);
      if (a.mood === "bad") group.mood = "bad";
      for (const n of a.nodes) if (!group.nodes.includes(n)) group.nodes.push(n);
    }
    const bad = (g: Group) => g.list.filter((a) => a.mood === "bad").length;
    for (const g of groups.values()) g.list.sort((a, b) => Number(a.mood === "warn") - Number(b.mood === "warn"));
    return [...groups.values()].sort((a, b) => bad(b) - bad(a) || b.nodes.length - a.nodes.length);
  }
}

/** attention collects the faults that all calls have shown, by Service, the worst first. */
export function attention(c: Cluster): Group[] {
  const all = new Faults();
  for (const n of c.scope) {
    const name = nodeName(n);
    if (n.error) {
      all.add(`silent ${name}`, name, { mood: "bad", what: `Node ${name} does not answer`, why: n.error });
      continue;
    }
    const s = n.status;
    if (!s) continue;
    const waits = s.sync?.pendingSince ? ms(s.time) - ms(s.sync.pendingSince) : 0;
    if (waits > 10_000) {
      all.add("waits", name, { mood: "bad", what: "Changes wait", why: `The oldest change is not in the kernel since ${duration(waits)}.`, detail: { kind: "runbook", name: "SpillwayChangesWait" } });
    }
    for (const d of s.dataplanes) if (d.error) all.add(`dataplane ${d.name} ${d.error}`, name, { mood: "bad", what: `The ${d.name} dataplane fails`, why: d.error, detail: { kind: "runbook", name: "SpillwaySyncErrors" } });
    const off = s.hooks.filter((h) => h.error);
    if (off.length > 0) all.add(`hooks ${name}`, name, { mood: "bad", what: `${plural(off.length, "program")} ${off.length === 1 ? "is" : "are"} not attached`, why: `${off[0]!.program} on ${off[0]!.place}: ${off[0]!.error}`, detail: { kind: "runbook", name: "SpillwayHooksMissing" } });
    for (const t of s.tables) {
      const share = Number(t.used) / Math.max(Number(t.size), 1);
      if (share >= 0.8) {
        all.add(`table ${t.name} ${name}`, name, { mood: share >= 0.95 ? "bad" : "warn", what: `Table ${t.name} is ${Math.floor(share * 100)} % full`, why: `${count(t.used)} of ${count(t.size)} entries are in use.`, detail: /(^| )flows$/.test(t.name) ? { kind: "runbook", name: "SpillwayFlowTableFull" } : undefined });
      }
    }
    for (const p of s.problems.slice(0, 5)) all.add(`problem ${p.where} ${p.what}`, name, { mood: "warn", what: p.what, why: serviceOf(p.where) ? "" : p.where, service: serviceOf(p.where) });
    const more = Math.max(s.problems.length - 5, 0) + s.moreProblems;
    for (const f of faults(s.findings)) addFinding(all, name, f);
    if (more > 0) all.add(`more ${name}`, name, { mood: "warn", what: plural(more, "more problem"), why: "The agent's log has all.", detail: { kind: "runbook", name: "SpillwayProblems" } });
  }
  for (const r of c.findings.value ?? []) {
    if (r.node.status?.networkNamespace) continue; // its status has them
    for (const f of faults(r.value?.findings ?? [])) addFinding(all, nodeName(r.node), f);
  }
  addFailing(all, c);
  for (const d of c.drops.value?.drops ?? []) {
    if (!d.rate || d.rate < 0.05) continue;
    const reason = reasonOf(d.reason, d.meaning);
    // A rate differs by node, so the worst node has the words.
    all.add(`drop ${d.reason} ${d.service ? "" : d.node}`, d.node, {
      mood: reason.wanted ? "warn" : "bad",
      what: refuses(d.reason) ? `Connections are refused: ${per(d.rate, "packet")} (${d.reason})` : `${per(d.rate, "packet")} are dropped (${d.reason})`,
      why: reason.words, service: d.service ? `${d.namespace}/${d.service}` : "", view: "drops",
      detail: reason.runbook ? { kind: "runbook", name: reason.runbook } : undefined,
    });
  }
  return all.groups();
}

/** addFailing adds endpoints that do not answer or that refuse, unless a finding has them. */
function addFailing(all: Faults, c: Cluster) {
  const now = nowSecond();
  const found = new Set(c.scope.flatMap((n) => n.status?.findings ?? []).map((f) => `${f.id} ${f.object?.endpoint}`));
  const failing = [...c.traffic.failing.values()].filter((f) => f.fails(now)).sort((a, b) => b.failed.now(now) - a.failed.now(now));
  let left = 5;
  for (const f of failing) {
    const id = f.how === "silent" ? "endpoint-unanswered" : "endpoint-refuses";
    if (found.has(`${id} ${f.endpoint}`) || left-- <= 0) continue;
    const what = `Endpoint ${f.endpoint} ${f.how === "silent" ? "does not answer" : "refuses connections"}`;
    const who = f.pod ? `pod ${f.pod}` : "it";
    const why = f.how === "silent" ? `Connections to ${who} ended without a packet from it.` : `Connections to ${who} were answered with an RST.`;
    for (const node of f.nodes.size > 0 ? f.nodes : [""]) all.add(what, node, { mood: "bad", what, why, service: f.service });
  }
}

/** addFinding adds a finding of a node; its id and its object identify it. */
function addFinding(all: Faults, node: string, f: Finding) {
  const o = f.object;
  const service = o?.kind === "Service" ? `${o.namespace}/${o.name}` : "";
  const id = JSON.stringify([f.id, o?.kind, o?.namespace, o?.name, o?.port, o?.endpoint]);
  all.add(id, node, { mood: f.severity === "critical" ? "bad" : "warn", what: f.title, why: f.detail, service, view: "findings" });
}

function serviceOf(where: string): string {
  return where.match(/^Service ([a-z0-9.-]+\/[a-z0-9.-]+)$/)?.[1] ?? "";
}

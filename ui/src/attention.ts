import type { Cluster } from "./cluster";
import { nodeName } from "./cluster";
import type { Detail, View } from "./context";
import type { Finding } from "./gen/spillway/node/v1alpha1/node_pb";
import { faults, reasonOf } from "./reasons";
import { count, duration, ms, plural, short } from "./text";
import { nowSecond } from "./traffic";

/** Attention is a fault that the operator should see first, and where it is explained. */
export interface Attention {
  mood: "bad" | "warn";
  what: string;
  why: string;
  view?: View;
  detail?: Detail;
}

function service(key: string): Detail {
  const [namespace = "", name = ""] = key.split("/");
  return { kind: "service", namespace, name };
}

/** attention collects the faults that all calls have shown, the worst first. */
export function attention(c: Cluster): Attention[] {
  const list: Attention[] = [];
  const now = nowSecond();
  for (const n of c.scope) {
    const name = nodeName(n);
    if (n.error) {
      list.push({ mood: "bad", what: `Node ${name} does not answer`, why: n.error });
      continue;
    }
    const s = n.status;
    if (!s) continue;
    const waits = s.sync?.pendingSince ? ms(s.time) - ms(s.sync.pendingSince) : 0;
    if (waits > 10_000) {
      list.push({ mood: "bad", what: `Changes wait on ${name}`, why: `The oldest change is not in the kernel since ${duration(waits)}.`, detail: { kind: "runbook", name: "SpillwayChangesWait" } });
    }
    for (const d of s.dataplanes) if (d.error) list.push({ mood: "bad", what: `The ${d.name} dataplane of ${name} fails`, why: d.error, detail: { kind: "runbook", name: "SpillwaySyncErrors" } });
    const off = s.hooks.filter((h) => h.error);
    if (off.length > 0) list.push({ mood: "bad", what: `${plural(off.length, "program")} of ${name} ${off.length === 1 ? "is" : "are"} not attached`, why: `${off[0]!.program} on ${off[0]!.place}: ${off[0]!.error}`, detail: { kind: "runbook", name: "SpillwayHooksMissing" } });
    for (const t of s.tables) {
      const share = Number(t.used) / Math.max(Number(t.size), 1);
      if (share >= 0.8) {
        list.push({ mood: share >= 0.95 ? "bad" : "warn", what: `Table ${t.name} of ${name} is ${Math.floor(share * 100)} % full`, why: `${count(t.used)} of ${count(t.size)} entries are in use.`, detail: t.name === "flows" ? { kind: "runbook", name: "SpillwayFlowTableFull" } : undefined });
      }
    }
    for (const p of s.problems.slice(0, 5)) list.push({ mood: "warn", what: p.where || `Node ${name}`, why: p.what, detail: serviceOf(p.where) });
    const more = Math.max(s.problems.length - 5, 0) + s.moreProblems;
    for (const f of faults(s.findings)) list.push(ofFinding(f));
    if (more > 0) list.push({ mood: "warn", what: `${plural(more, "more problem")} on ${name}`, why: "The agent's log has all.", detail: { kind: "runbook", name: "SpillwayProblems" } });
  }
  const silent = [...c.traffic.silent.values()].map((s) => ({ ...s, n: s.count.now(now) })).filter((s) => s.n >= 0.8);
  for (const s of silent.sort((a, b) => b.n - a.n).slice(0, 5)) {
    list.push({ mood: "bad", what: `${s.service}: endpoint ${s.endpoint} does not answer`, why: `Connections to ${s.pod ? `pod ${s.pod}` : "it"} ended without a packet from it.`, detail: service(s.service) });
  }
  for (const d of c.drops.value?.drops ?? []) {
    if (!d.rate || d.rate < 0.05) continue;
    const reason = reasonOf(d.reason, d.meaning);
    const where = d.service ? `${d.namespace}/${d.service}` : `Node ${d.node}`;
    list.push({ mood: reason.wanted ? "warn" : "bad", what: `${where}: ${short(d.rate)} packets/s are dropped (${d.reason})`, why: reason.words, view: "drops", detail: reason.runbook ? { kind: "runbook", name: reason.runbook } : undefined });
  }
  for (const r of c.findings.value ?? []) {
    if (r.node.status?.networkNamespace) continue; // its status has them
    for (const f of faults(r.value?.findings ?? [])) list.push(ofFinding(f));
  }
  return list.sort((a, b) => Number(a.mood === "warn") - Number(b.mood === "warn"));
}

/** ofFinding shows a finding; one about a Service leads to the Service. */
function ofFinding(f: Finding): Attention {
  const o = f.object;
  return {
    mood: f.severity === "critical" ? "bad" : "warn", what: f.title, why: f.detail, view: "findings",
    detail: o?.kind === "Service" ? service(`${o.namespace}/${o.name}`) : undefined,
  };
}

function serviceOf(where: string): Detail | undefined {
  const found = where.match(/^Service ([a-z0-9.-]+\/[a-z0-9.-]+)$/);
  return found ? service(found[1]!) : undefined;
}

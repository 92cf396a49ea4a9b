import { useState } from "preact/hooks";
import { serviceDetail } from "../attention";
import { useApp } from "../context";
import type { Entry } from "../flows";
import type { FlowEvent } from "../gen/spillway/node/v1alpha1/node_pb";
import type { Dropped } from "../cluster";
import { nodeName } from "../cluster";
import { Chip, Message, Name } from "../parts/basics";
import { useSource, useTick } from "../parts/hooks";
import { reasonOf, refuses } from "../reasons";
import { clock, count, flowService, kinds, peer, shown, short } from "../text";

const latest = 30;

/** Line is a cause and a Service, with the sums of all nodes. */
interface Line {
  reason: string;
  meaning: string;
  service: string;
  nodes: string[];
  packets: bigint;
  rate?: number;
  clients: string[];
}

const plain = (reason: string) => reason.toLowerCase().replace(/^drop_/, "");

/** linesOf sums up the drops of nodes, and adds the clients that events name, those with the most events first. */
function linesOf(drops: Dropped[], events: FlowEvent[]): Line[] {
  const clients = new Map<string, Map<string, number>>();
  for (const e of events) {
    if (!e.flow?.client) continue;
    const key = `${plain(e.reason)} ${flowService(e.flow)}`;
    const name = e.flow.client.pod || e.flow.client.address || "unknown";
    const of = clients.get(key) ?? new Map<string, number>();
    clients.set(key, of.set(name, (of.get(name) ?? 0) + 1));
  }
  const lines = new Map<string, Line>();
  for (const d of drops) {
    const service = d.service ? `${d.namespace}/${d.service}` : "";
    const key = `${plain(d.reason)} ${service}`;
    const line = lines.get(key);
    if (line) {
      line.packets += d.packets;
      line.nodes.push(d.node);
      if (d.rate !== undefined) line.rate = (line.rate ?? 0) + d.rate;
      continue;
    }
    const of = [...(clients.get(key) ?? [])].sort((x, y) => y[1] - x[1]).map(([name]) => name);
    lines.set(key, { reason: d.reason, meaning: d.meaning, service, nodes: [d.node], packets: d.packets, rate: d.rate, clients: of });
  }
  return [...lines.values()].sort((x, y) => (y.rate ?? 0) - (x.rate ?? 0) || Number(y.packets - x.packets));
}

function someNames(names: string[]) {
  const more = names.length > 2 ? ` and ${count(names.length - 2)} more` : "";
  return names.length === 0 ? "–" : names.slice(0, 2).join(", ") + more;
}

/** Drops says in words why packets were refused or dropped. */
export function Drops() {
  const app = useApp();
  const { cluster } = app;
  useSource(cluster.drops, cluster.watch);
  useTick(1000);
  const [search, setSearch] = useState("");
  const [byService, setByService] = useState(false);
  const value = cluster.drops.value;
  const events = cluster.watch.bad.newestFirst((e) => cluster.shows(e.event.flow?.node ?? "")).map((e) => e.event);
  const all = linesOf(value?.drops ?? [], events);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (l: Line) => [l.reason, reasonOf(l.reason, l.meaning).words, l.service, ...l.nodes, ...l.clients].join(" ").toLowerCase();
  const list = all.filter((l) => words.every((w) => text(l).includes(w)));
  const groups = new Map<string, Line[]>();
  for (const l of list) {
    const key = byService ? l.service : l.reason;
    groups.set(key, [...(groups.get(key) ?? []), l]);
  }
  const several = cluster.scope.length > 1;
  return (
    <>
      <div class="bar-of-view">
        <h1>Drops</h1>
        <input type="search" placeholder="Search: cause, Service, client" aria-label="Search drops" value={search} onInput={(e) => setSearch(e.currentTarget.value)} />
        <div class="switch" role="group" aria-label="Group by">
          <button type="button" aria-pressed={!byService} onClick={() => setByService(false)}>By cause</button>
          <button type="button" aria-pressed={byService} onClick={() => setByService(true)}>By Service</button>
        </div>
      </div>
      {cluster.drops.error && <p class="banner bad" role="alert">{shown(cluster.drops.error)}</p>}
      {value?.errors.map((r) => <p key={r.node.id} class="banner warn" role="alert">{shown(nodeName(r.node))}: {shown(r.error)}</p>)}
      {!value && !cluster.drops.error && <Message title="Reading the counters …" />}
      {value && all.length === 0 && value.errors.length === 0 && <Message title="No packet was dropped" mood="good"><p>The eBPF programs have refused or dropped none since they were loaded. The command spillway drops shows those of the whole kernel.</p></Message>}
      {all.length > 0 && list.length === 0 && <p class="quiet">No drop matches.</p>}
      {list.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Drops by reason">
          <table class="wide drops">
            <thead>
              <tr>
                <th scope="col">{byService ? "Cause" : "Service"}</th>
                <th scope="col">Clients</th>
                {several && <th scope="col">Nodes</th>}
                <th scope="col" class="number">Packets/s</th>
                <th scope="col" class="number">Packets</th>
              </tr>
            </thead>
            {[...groups].map(([key, lines]) => (
              <tbody key={key}>
                <tr>
                  <th scope="rowgroup" colSpan={several ? 5 : 4} class="group">{byService ? <ServiceLink service={key} /> : <Cause line={lines[0]!} />}</th>
                </tr>
                {lines.map((l) => <DropRow key={`${l.reason} ${l.service}`} line={l} several={several} byService={byService} />)}
              </tbody>
            ))}
          </table>
        </div>
      )}
      <h2>Latest</h2>
      <Latest words={words} />
    </>
  );
}

function ServiceLink({ service }: { service: string }) {
  const app = useApp();
  return service ? <button type="button" class="link" onClick={() => app.open(serviceDetail(service))}>{shown(service)}</button> : <span class="soft">not counted by Service</span>;
}

function Cause({ line: l }: { line: Line }) {
  const app = useApp();
  const reason = reasonOf(l.reason, l.meaning);
  return (
    <>
      <strong>{shown(reason.words || l.reason)}</strong>{" "}
      <span class="soft">
        {refuses(l.reason) ? "Refuses connections." : "Drops packets."} {reason.wanted && "The configuration asks for it."} <code>{shown(l.reason)}</code>
      </span>{" "}
      {reason.runbook && <button type="button" class="small" aria-label={`Runbook for ${shown(l.reason)}`} onClick={() => app.open({ kind: "runbook", name: reason.runbook! })}>Runbook</button>}
    </>
  );
}

function DropRow({ line: l, several, byService }: { line: Line; several: boolean; byService: boolean }) {
  const mood = (l.rate ?? 0) > 0 ? (reasonOf(l.reason).wanted ? "warn" : "bad") : "";
  return (
    <tr>
      <td>{byService ? <Cause line={l} /> : <ServiceLink service={l.service} />}</td>
      <td><Name text={someNames(l.clients)} /></td>
      {several && <td><Name text={someNames(l.nodes)} /></td>}
      <td class={`number ${mood}`}>{l.rate === undefined ? "…" : short(l.rate)}</td>
      <td class="number">{count(l.packets)}</td>
    </tr>
  );
}

function Latest({ words }: { words: string[] }) {
  const app = useApp();
  const { cluster } = app;
  const matches = ({ event: e }: Entry) => {
    const text = [e.reason, e.flow && flowService(e.flow), e.flow?.client?.pod, peer(e.flow?.client)].join(" ").toLowerCase();
    return cluster.shows(e.flow?.node ?? "") && words.every((w) => text.includes(w));
  };
  const entries = cluster.watch.bad.newestFirst(matches, latest);
  if (cluster.watch.error) return <p class="quiet">{shown(cluster.watch.error)}</p>;
  if (entries.length === 0) return <p class="quiet">{words.length > 0 ? "No event matches." : "No packet was refused or dropped since this page was opened."}</p>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Latest refused and dropped packets">
      <table class="wide">
        <thead>
          <tr><th scope="col">Time</th><th scope="col">What</th><th scope="col">Client</th><th scope="col">Asked for</th><th scope="col">Why</th><th scope="col"><span class="hidden">Decision</span></th></tr>
        </thead>
        <tbody>
          {entries.map(({ id, event }) => {
            const kind = kinds.find((k) => k.kind === event.kind);
            const f = event.flow;
            return (
              <tr key={id}>
                <td class="nowrap">{clock(event.time)}</td>
                <td><Chip mood={kind?.mood ?? "soft"}>{kind?.name}</Chip></td>
                <td><Name text={f?.client?.pod || peer(f?.client)} /></td>
                <td><Name text={`${f?.namespace}/${f?.service}`} /></td>
                <td><code>{shown(event.reason)}</code></td>
                <td class="end"><button type="button" class="small" aria-label={`Decision at ${clock(event.time)}`} onClick={() => app.open({ kind: "flow", event, id: `drop ${id}` })}>Decision</button></td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

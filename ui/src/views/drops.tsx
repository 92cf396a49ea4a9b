import { useApp } from "../context";
import type { Dropped } from "../cluster";
import { nodeName } from "../cluster";
import { Chip, Message, Name } from "../parts/basics";
import { useSource, useTick } from "../parts/hooks";
import { reasonOf } from "../reasons";
import { clock, count, kinds, peer, shown, short } from "../text";

const latest = 30;

/** Drops says in words why packets were refused or dropped. */
export function Drops() {
  const app = useApp();
  const { cluster } = app;
  useSource(cluster.drops, cluster.watch);
  useTick(1000);
  const value = cluster.drops.value;
  const list = [...(value?.drops ?? [])].sort((a, b) => (b.rate ?? 0) - (a.rate ?? 0) || Number(b.packets - a.packets));
  const several = cluster.scope.length > 1;
  return (
    <>
      <h1>Drops</h1>
      {cluster.drops.error && <p class="banner bad" role="alert">{shown(cluster.drops.error)}</p>}
      {value?.errors.map((r) => <p key={r.node.id} class="banner warn" role="alert">{shown(nodeName(r.node))}: {shown(r.error)}</p>)}
      {!value && !cluster.drops.error && <Message title="Reading the counters …" />}
      {value && list.length === 0 && value.errors.length === 0 && <Message title="No packet was dropped" mood="good"><p>The eBPF programs have refused or dropped none since they were loaded. The command spillway drops shows those of the whole kernel.</p></Message>}
      {list.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Drops by reason">
          <table class="wide">
            <thead>
              <tr>
                <th scope="col">Why</th>
                <th scope="col">Service</th>
                {several && <th scope="col">Node</th>}
                <th scope="col" class="number">Packets/s</th>
                <th scope="col" class="number">Packets</th>
                <th scope="col"><span class="hidden">Runbook</span></th>
              </tr>
            </thead>
            <tbody>{list.map((d) => <DropRow key={`${d.node} ${d.reason} ${d.namespace}/${d.service}`} drop={d} several={several} />)}</tbody>
          </table>
        </div>
      )}
      <h2>Latest</h2>
      <Latest />
    </>
  );
}

function DropRow({ drop: d, several }: { drop: Dropped; several: boolean }) {
  const app = useApp();
  const reason = reasonOf(d.reason, d.meaning);
  const grows = (d.rate ?? 0) > 0;
  return (
    <tr>
      <td>
        <strong>{shown(reason.words || d.reason)}</strong>
        <span class="soft line">
          <code>{shown(d.reason)}</code> {reason.wanted && "The configuration asks for it."}
        </span>
      </td>
      <td>{d.service ? <button type="button" class="link" onClick={() => app.open({ kind: "service", namespace: d.namespace, name: d.service })}>{shown(`${d.namespace}/${d.service}`)}</button> : <span class="soft">not counted by Service</span>}</td>
      {several && <td><Name text={d.node} /></td>}
      <td class={`number ${grows ? (reason.wanted ? "warn" : "bad") : ""}`}>{d.rate === undefined ? "…" : short(d.rate)}</td>
      <td class="number">{count(d.packets)}</td>
      <td class="end">{reason.runbook && <button type="button" class="small" aria-label={`Runbook for ${shown(d.reason)}`} onClick={() => app.open({ kind: "runbook", name: reason.runbook! })}>Runbook</button>}</td>
    </tr>
  );
}

function Latest() {
  const app = useApp();
  const { cluster } = app;
  const entries = cluster.watch.bad.newestFirst((e) => cluster.shows(e.event.flow?.node ?? ""), latest);
  if (cluster.watch.error) return <p class="quiet">{shown(cluster.watch.error)}</p>;
  if (entries.length === 0) return <p class="quiet">No packet was refused or dropped since this page was opened.</p>;
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

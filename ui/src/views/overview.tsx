import { useMemo, useState } from "preact/hooks";
import { attention, serviceDetail } from "../attention";
import type { Group } from "../attention";
import { nodeName } from "../cluster";
import type { NodeState } from "../cluster";
import { useApp } from "../context";
import { Chip, Message, Meter } from "../parts/basics";
import { Chart } from "../parts/chart";
import { useSource, useTick } from "../parts/hooks";
import { faults } from "../reasons";
import { count, duration, ms, plural, short, shown } from "../text";
import { knownOnly, nowSecond, rateSeconds, rateText } from "../traffic";

const lines = [
  { name: "connections opened", color: "--blue", fill: true },
  { name: "connections refused", color: "--orange" },
  { name: "packets dropped", color: "--red" },
];

/** Overview shows what needs attention, the traffic, and each node. */
export function Overview() {
  const { cluster } = useApp();
  useSource(cluster, cluster.findings, cluster.drops);
  useTick(1000);
  if (cluster.nodes.length === 0) return <Message title="Connecting to the agent …" />;
  const scope = cluster.scope;
  if (scope.length === 1 && scope[0]!.error && !scope[0]!.status) {
    return <Message title="No agent answers" mood="bad"><p>{shown(scope[0]!.error)}</p></Message>;
  }
  return (
    <>
      <h1>Overview</h1>
      <Numbers />
      <div class="columns">
        <AttentionList />
        <Rates />
      </div>
      <h2>{scope.length === 1 ? "Node" : "Nodes"}</h2>
      <div class={scope.length === 1 ? "cards one" : "cards"}>{scope.map((n) => <NodeCard key={n.id} node={n} />)}</div>
    </>
  );
}

function Numbers() {
  const { cluster } = useApp();
  const second = nowSecond();
  const t = cluster.traffic;
  const live = cluster.watch.connected;
  const p50 = t.handshakes.quantile(0.5);
  const p99 = t.handshakes.quantile(0.99);
  const largest = Math.max(0, ...cluster.scope.map((n) => n.status?.sync?.services ?? 0));
  const numbers: [string, string, string?][] = [
    ["Services", count(largest)],
    ["new connections/s", live ? rateText(t.totals.opened.rate(second, rateSeconds), cluster.reported) : "–"],
    ["connections refused/s", live ? short(t.totals.refused.rate(second, 5)) : "–", t.totals.refused.rate(second, 5) > 0 ? "warn" : ""],
    ["packets dropped/s", live ? short(t.totals.dropped.rate(second, 5)) : "–", t.totals.dropped.rate(second, 5) > 0 ? "bad" : ""],
    ["handshake, median", p50 === undefined ? "–" : duration(p50)],
    ["handshake, p99", p99 === undefined ? "–" : duration(p99)],
  ];
  return (
    <dl class="numbers">
      {numbers.map(([name, value, mood]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd class={mood}>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

function AttentionList() {
  const app = useApp();
  const groups = attention(app.cluster);
  const [all, setAll] = useState(false);
  const most = all ? 100 : 6;
  const several = app.cluster.scope.length > 1;
  return (
    <section class="card" aria-labelledby="attention">
      <h2 id="attention">Needs attention</h2>
      {groups.length === 0 ? (
        <p class="quiet">Nothing is known to be wrong.</p>
      ) : (
        <ul class="attention">
          {groups.slice(0, most).map((g) => <GroupItem key={g.service || g.list[0]!.what + g.nodes.join()} group={g} several={several} />)}
        </ul>
      )}
      {groups.length > 6 && <button type="button" class="small" aria-expanded={all} onClick={() => setAll(!all)}>{all ? "Show fewer" : `Show ${count(groups.length - 6)} more`}</button>}
    </section>
  );
}

const mostNodes = 4;

/** nodesText names some nodes. */
function nodesText(nodes: string[]) {
  const more = nodes.length > mostNodes ? ` and ${count(nodes.length - mostNodes)} more` : "";
  return `on ${nodes.slice(0, mostNodes).map(shown).join(", ")}${more}`;
}

function GroupItem({ group: g, several }: { group: Group; several: boolean }) {
  const app = useApp();
  return (
    <li class={g.mood}>
      {g.service && (
        <div class="title">
          <strong>Service {shown(g.service)}</strong>
          {several && g.nodes.length > 0 && <span class="soft">{nodesText(g.nodes)}</span>}
          <button type="button" class="small" aria-label={`Show: Service ${shown(g.service)}`} onClick={() => app.open(serviceDetail(g.service))}>Show</button>
        </div>
      )}
      {g.list.map((a) => {
        const leads = a.detail?.kind === "runbook" ? "Runbook" : "Show";
        const some = several && a.nodes.length > 0 && (!g.service || a.nodes.length < g.nodes.length);
        return (
          <div class="fault" key={a.what}>
            <div>
              {g.service ? <span class={a.mood}>{shown(a.what)}</span> : <strong>{shown(a.what)}</strong>}
              {a.why && <span class="soft line">{shown(a.why)}</span>}
              {some && <span class="soft line">{nodesText(a.nodes)}</span>}
            </div>
            {(a.detail || (a.view && !g.service)) && (
              <button
                type="button"
                class="small"
                aria-label={`${leads}: ${shown(g.service ? `${g.service}: ${a.what}` : a.what)}`}
                onClick={() => (a.detail ? app.open(a.detail) : app.go(a.view!))}
              >
                {leads}
              </button>
            )}
          </div>
        );
      })}
    </li>
  );
}

function Rates() {
  const { cluster } = useApp();
  const second = nowSecond() - 1; // events of the last second are on the way
  const data = useMemo(() => {
    const length = 120;
    const { opened, refused, dropped } = cluster.traffic.totals;
    const times = Array.from({ length }, (_, i) => second - length + i);
    return [times, knownOnly(times, opened.series(second, length), cluster.reported), refused.series(second, length), dropped.series(second, length)];
  }, [second, cluster.traffic]);
  const last = data[1]!.at(-1);
  const opened = typeof last === "number" ? plural(last, "was opened", "were opened") + " in the last second" : "how many were opened is not known";
  return (
    <section class="card" aria-labelledby="rates">
      <h2 id="rates">Each second</h2>
      {cluster.watch.error ? (
        <p class="quiet">{shown(cluster.watch.error)}</p>
      ) : (
        <Chart label={`Connections in the last two minutes; ${opened}`} lines={lines} data={data} height={230} />
      )}
    </section>
  );
}

function NodeCard({ node }: { node: NodeState }) {
  const s = node.status;
  const name = nodeName(node);
  const title = (
    <header>
      <h3>{shown(name)}</h3>
      {node.error ? <Chip mood="bad">no answer</Chip> : !s ? <Chip mood="soft">asking</Chip> : s.problems.length > 0 ? <Chip mood="warn">{plural(s.problems.length + s.moreProblems, "problem")}</Chip> : faults(s.findings).length > 0 ? <Chip mood="warn">{plural(faults(s.findings).length, "finding")}</Chip> : <Chip mood="good">serving</Chip>}
    </header>
  );
  if (!s) {
    return <article class="card" aria-label={shown(name)}>{title}<p>{node.error ? shown(node.error) : "Waiting for an answer …"}</p></article>;
  }
  const now = ms(s.time);
  const synced = s.sync?.lastSynced ? now - ms(s.sync.lastSynced) : undefined;
  const skew = node.seen > 0 ? now - node.seen : 0;
  const off = s.hooks.filter((h) => h.error);
  const missing = s.features.filter((f) => !f.present);
  return (
    <article class="card" aria-label={shown(name)}>
      {title}
      {node.error && <p class="bad">{shown(node.error)} This is what it last reported, {duration(Date.now() - node.seen)} ago.</p>}
      <dl class="facts">
        <dt>Mode</dt>
        <dd>{shown(s.proxyMode)} <span class="soft">{s.dataplanes.map((d) => `${shown(d.name)} ${plural(d.ports, "port")}`).join(", ")}</span></dd>
        <dt>Version</dt>
        <dd>{shown(s.version)} <span class="soft">on Linux {shown(s.kernel)}</span></dd>
        <dt>Running</dt>
        <dd>{s.started ? duration(now - ms(s.started)) : "–"}{Math.abs(skew) > 5000 && <span class="warn"> clock differs by {duration(Math.abs(skew))}</span>}</dd>
        <dt>Last sync</dt>
        <dd>{!s.sync?.listed ? <span class="warn">waits for the first list</span> : synced === undefined ? "–" : `${duration(Math.max(synced, 0))} ago`}</dd>
        <dt>Serves</dt>
        <dd>{plural(s.sync?.services ?? 0, "Service")}, {plural(s.sync?.endpoints ?? 0, "endpoint")}</dd>
        <dt>Hooks</dt>
        <dd>{s.hooks.length === 0 ? "none" : `${plural(s.hooks.length, "program")} on ${plural(new Set(s.hooks.map((h) => h.place)).size, "place")}`}{off.length > 0 && <span class="warn"> {plural(off.length, "program")} not attached: {off.slice(0, 5).map((h) => shown(`${h.program} on ${h.place} (${h.error})`)).join(", ")}</span>}</dd>
        <dt>Events</dt>
        <dd>
          {node.info.flows ? <span class="warn">{shown(node.info.flows)}</span> : !s.events?.enabled ? "off" : `${count(s.events.received)} received`}
          {s.events && s.events.lost > 0n && <span class="warn"> {count(s.events.lost)} lost</span>}
          {s.events && s.events.sampledOut > 0n && <span class="soft"> {count(s.events.sampledOut)} left out by sampling</span>}
        </dd>
        {missing.length > 0 && (
          <>
            <dt>Without</dt>
            <dd>{missing.map((f) => shown(f.detail ? `${f.name} (${f.detail})` : f.name)).join(", ")}</dd>
          </>
        )}
      </dl>
      <div class="meters">
        {s.tables.map((t) => <Meter key={t.name} name={t.name} used={Number(t.used)} size={Number(t.size)} label={`${short(Number(t.used))} of ${short(Number(t.size))}`} />)}
      </div>
    </article>
  );
}

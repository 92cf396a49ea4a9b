import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { useApp } from "../context";
import { nodeSize, place, shape, strongest } from "../graph";
import type { Layout, Link, Node, Picture } from "../graph";
import { Message } from "../parts/basics";
import { useSource, useTick } from "../parts/hooks";
import { duration, plural, short, shown } from "../text";
import { notReported, nowSecond } from "../traffic";
import type { Reported } from "../traffic";

const sizes = [20, 40, 80];
const columnNames = { client: "Client", service: "Service", endpoint: "Endpoint" };

/** ServiceMap draws which clients use which Services and endpoints. */
export function ServiceMap() {
  const app = useApp();
  const { cluster } = app;
  useSource(cluster);
  useTick(1000);
  const [most, setMost] = useState(40);
  const [search, setSearch] = useState("");
  const [paused, setPaused] = useState(false);
  const kept = useRef<{ at: number; shape: string; layout: Layout; picture: Picture } | undefined>(undefined);
  const second = nowSecond();
  const area = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = area.current!;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth - 40));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  // New nodes come in every five seconds at most, so that the picture stays readable.
  const key = `${most} ${search} ${cluster.selected} ${width}`;
  const lastKey = useRef(key);
  const fresh = strongest(cluster.traffic, second, most, search);
  if (!kept.current || lastKey.current !== key || (!paused && second - kept.current.at >= 5)) {
    const s = shape(fresh);
    const layout = kept.current?.shape === s && lastKey.current === key ? kept.current.layout : place(fresh, width);
    kept.current = { at: second, shape: s, layout, picture: fresh };
    lastKey.current = key;
  }
  const { layout, picture } = kept.current;
  // The rates of what is drawn are current.
  const rates = useMemo(() => {
    const all = strongest(cluster.traffic, second, Infinity, search);
    return {
      nodes: new Map(all.nodes.map((n) => [n.id, n])),
      links: new Map(all.links.map((l) => [l.id, l])),
    };
  }, [second, search, cluster.traffic]);

  return (
    <div class="fill" ref={area}>
      <div class="bar-of-view">
        <h1>Map</h1>
        <input type="search" placeholder="Search: namespace, Service, pod" aria-label="Search the map" value={search} onInput={(e) => setSearch(e.currentTarget.value)} />
        <label class="inline">
          Show{" "}
          <select value={most} onChange={(e) => setMost(Number(e.currentTarget.value))}>
            {sizes.map((n) => <option key={n} value={n}>{n} strongest</option>)}
          </select>
        </label>
        <button type="button" aria-pressed={paused} onClick={() => setPaused(!paused)}>{paused ? "Resume" : "Hold still"}</button>
        <span class="soft" role="status">{picture.hidden > 0 ? `${plural(picture.hidden, "weaker way")} not shown` : ""}</span>
      </div>
      {cluster.watch.error ? (
        <Message title="There are no events to draw" mood="warn"><p>{shown(cluster.watch.error)}</p></Message>
      ) : picture.nodes.length === 0 ? (
        <Nothing search={search} why={cluster.reported.why} />
      ) : (
        <>
          <div class="map" tabIndex={0} role="region" aria-label="Map of clients, Services and endpoints">
            <svg viewBox={`0 0 ${layout.width} ${layout.height}`} width={layout.width} height={layout.height} role="group" aria-label={`${plural(picture.nodes.length, "node")}`}>
              <g aria-hidden="true">{calmFirst(picture.links, rates.links).map((l) => <Way key={l.id} link={rates.links.get(l.id) ?? { ...l, rate: 0, bad: 0 }} layout={layout} />)}</g>
              {picture.nodes.map((n) => <Box key={n.id} node={rates.nodes.get(n.id) ?? { ...n, rate: 0, bad: 0 }} layout={layout} />)}
            </svg>
          </div>
          <p class="soft legend">Numbers are new connections a second. <span class="bad">Red</span>: some fail (refused, dropped, reset or not answered).</p>
        </>
      )}
    </div>
  );
}

function Nothing({ search, why }: { search: string; why: Reported["why"] }) {
  if (search) return <Message title="Nothing matches"><p>The search looks at the names on the map.</p></Message>;
  return <Message title={why === "not known" ? "The traffic is not known" : why ? "Turning on events of flows …" : "No traffic yet"}><p>{why === "not known" ? notReported : "The map is drawn from new connections."}</p></Message>;
}

/** calmFirst orders ways so that those that fail are drawn above the others. */
function calmFirst(links: Link[], rates: Map<string, Link>): Link[] {
  const bad = (l: Link) => rates.get(l.id)?.bad ?? 0;
  return [...links].sort((a, b) => bad(a) - bad(b));
}

function Way({ link, layout }: { link: Link; layout: Layout }) {
  const a = layout.places.get(link.from);
  const b = layout.places.get(link.to);
  if (!a || !b) return null;
  const [x1, x2] = [a.x + layout.node / 2, b.x - layout.node / 2];
  const middle = (x1 + x2) / 2;
  const width = Math.min(1 + Math.log2(1 + link.rate + link.bad), 8);
  const mood = link.bad > 0.02 ? "bad" : "";
  return <path class={`way ${mood}`} d={`M${x1},${a.y} C${middle},${a.y} ${middle},${b.y} ${x2},${b.y}`} stroke-width={width} />;
}

function Box({ node, layout }: { node: Node; layout: Layout }) {
  const app = useApp();
  const at = layout.places.get(node.id);
  if (!at) return null;
  const name = shown(node.name);
  const key = node.kind === "service" ? node.name : undefined;
  const handshake = key === undefined ? undefined : app.cluster.traffic.services.get(key)?.handshakes.quantile(0.5);
  const open = () => {
    if (key === undefined) return;
    const [namespace = "", service = ""] = key.split("/");
    app.open({ kind: "service", namespace, name: service });
  };
  const failing = node.bad > 0.02;
  const numbers = `${short(node.rate)}/s${handshake === undefined ? "" : `, ${duration(handshake)}`}${failing ? `, ${short(node.bad)}/s fail` : ""}`;
  // A name is cut from its start, where the namespace is.
  const room = Math.floor((layout.node - 16) / 6.7);
  const cut = name.length > room ? "…" + name.slice(1 - room) : name;
  const button = key === undefined ? {} : { role: "button" as const, tabIndex: 0, onClick: open, onKeyDown: (e: KeyboardEvent) => {
    if (e.key !== "Enter" && e.key !== " ") return;
    e.preventDefault();
    open();
  } };
  return (
    <g class={`box ${node.kind}${failing ? " failing" : ""}`} transform={`translate(${at.x - layout.node / 2},${at.y - nodeSize.height / 2})`} {...button}>
      <title>{`${columnNames[node.kind]} ${name}: ${numbers}`}</title>
      <rect width={layout.node} height={nodeSize.height} rx="6" />
      <text x="8" y="17">{cut}</text>
      <text x="8" y="33" class="rate">{layout.node < 160 && failing ? `${short(node.bad)}/s fail` : layout.node < 160 ? `${short(node.rate)}/s` : numbers}</text>
    </g>
  );
}

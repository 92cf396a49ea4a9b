import type { Edge, Traffic } from "./traffic";

/** Kind is a column of the map. */
export type Kind = "client" | "service" | "endpoint";

export interface Node {
  id: string;
  kind: Kind;
  name: string;
  rate: number;
  bad: number;
}

export interface Link {
  id: string;
  from: string;
  to: string;
  rate: number;
  bad: number;
}

export interface Picture {
  nodes: Node[];
  links: Link[];
  /** hidden is how many ways are weaker than those shown. */
  hidden: number;
}

export const nodeSize = { width: 210, height: 40 };

/** strongest makes a picture of the ways with the highest rates; those that fail come first. */
export function strongest(traffic: Traffic, second: number, most: number, search = ""): Picture {
  const words = search.toLowerCase();
  const weight = (e: Edge) => e.opened.rate(second) + 20 * e.bad.rate(second);
  const active = [...traffic.edges.values()]
    .filter((e) => !words || [e.from, e.service, e.to].some((name) => name.toLowerCase().includes(words)))
    .map((edge) => ({ edge, weight: weight(edge) }))
    .filter((e) => e.weight > 0.01)
    .sort((a, b) => b.weight - a.weight);
  const nodes = new Map<string, Node>();
  const links = new Map<string, Link>();
  const add = <T extends { rate: number; bad: number }>(map: Map<string, T>, id: string, make: () => T, rate: number, bad: number) => {
    let item = map.get(id);
    if (!item) map.set(id, (item = make()));
    item.rate += rate;
    item.bad += bad;
  };
  for (const { edge } of active.slice(0, most)) {
    const rate = edge.opened.rate(second);
    const bad = edge.bad.rate(second);
    const ids = { client: `c ${edge.from}`, service: `s ${edge.service}`, endpoint: `e ${edge.service} ${edge.to}` };
    const node = (kind: Kind, name: string) => add(nodes, ids[kind], () => ({ id: ids[kind], kind, name, rate: 0, bad: 0 }), rate, bad);
    const link = (from: string, to: string) => add(links, `${from} > ${to}`, () => ({ id: `${from} > ${to}`, from, to, rate: 0, bad: 0 }), rate, bad);
    node("client", edge.from);
    node("service", edge.service);
    link(ids.client, ids.service);
    if (edge.to) {
      node("endpoint", edge.to);
      link(ids.service, ids.endpoint);
    }
  }
  return { nodes: [...nodes.values()], links: [...links.values()], hidden: Math.max(0, active.length - most) };
}

/** shape is the same for pictures with equal nodes and links, whatever their rates. */
export function shape(p: Picture): string {
  return [...p.nodes.map((n) => n.id), ...p.links.map((l) => l.id)].sort().join("\n");
}

export interface Layout {
  /** node is how wide a node is. */
  node: number;
  width: number;
  height: number;
  places: Map<string, { x: number; y: number }>;
}

/** row is the height of a node with its distance to the next. */
const row = nodeSize.height + 10;

/** columns is how wide nodes and the gaps between the three columns are, in a width. */
function columns(width: number): { node: number; gap: number } {
  const gap = Math.min(Math.max(width * 0.08, 16), 110);
  return { node: Math.min(Math.max((width - 2 * gap) / 3, 84), nodeSize.width), gap };
}

/**
 * place computes where the nodes are in a width: clients, Services and endpoints in three columns. Those that
 * fail are first, then those with the highest rate; endpoints follow their Services.
 */
export function place(p: Picture, width: number): Layout {
  const { node, gap } = columns(width);
  const fails = (n: { bad: number }) => (n.bad > 0.02 ? n.bad : 0);
  const worst = (a: Node, b: Node) => fails(b) - fails(a) || b.rate - a.rate || (a.id < b.id ? -1 : 1);
  const of = (kind: Kind) => p.nodes.filter((n) => n.kind === kind).sort(worst);
  const services = of("service");
  const order = new Map(services.map((s, i) => [s.id, i]));
  const serviceOf = new Map(p.links.map((l) => [l.to, order.get(l.from) ?? 0]));
  const endpoints = of("endpoint").sort((a, b) => serviceOf.get(a.id)! - serviceOf.get(b.id)!);
  const places = new Map<string, { x: number; y: number }>();
  [of("client"), services, endpoints].forEach((list, column) =>
    list.forEach((n, i) => places.set(n.id, { x: column * (node + gap) + node / 2 + 1, y: i * row + nodeSize.height / 2 + 1 })),
  );
  const rows = Math.max(of("client").length, services.length, endpoints.length);
  return { node, width: 3 * node + 2 * gap + 2, height: rows * row, places };
}

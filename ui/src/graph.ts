import { Graph, layout as arrange } from "@dagrejs/dagre";
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
  width: number;
  height: number;
  places: Map<string, { x: number; y: number }>;
}

/** place computes where the nodes are: clients, Services and endpoints in three columns. */
export function place(p: Picture): Layout {
  const g = new Graph();
  g.setGraph({ rankdir: "LR", nodesep: 10, ranksep: 110, marginx: 4, marginy: 4 });
  g.setDefaultEdgeLabel(() => ({}));
  // Names decide the order of equals, so that a picture does not jump.
  for (const n of [...p.nodes].sort((a, b) => (a.id < b.id ? -1 : 1))) g.setNode(n.id, { ...nodeSize });
  for (const l of [...p.links].sort((a, b) => (a.id < b.id ? -1 : 1))) g.setEdge(l.from, l.to);
  arrange(g);
  const size = g.graph() as { width?: number; height?: number };
  const places = new Map<string, { x: number; y: number }>();
  for (const n of p.nodes) {
    const at = g.node(n.id) as { x: number; y: number };
    places.set(n.id, { x: at.x, y: at.y });
  }
  return { width: size.width ?? 0, height: size.height ?? 0, places };
}

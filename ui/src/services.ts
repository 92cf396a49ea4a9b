import type { Finding, Problem, Service } from "./gen/spillway/node/v1alpha1/node_pb";
import { faults } from "./reasons";
import { quantile } from "./traffic";
import type { Traffic } from "./traffic";
import { duration, portNames, serviceKey } from "./text";

/** Row is a Service as the selected nodes report it, with the sum of their counters. */
export interface Row {
  key: string;
  namespace: string;
  name: string;
  type: string;
  ports: string;
  endpoints: number;
  problems: Problem[];
  /** faults are the findings about it on any of the nodes, the worst first; each is there once. */
  faults: Finding[];
  served: boolean;
  counted: boolean;
  connections: number;
  active: number;
  refused: number;
  dropped: number;
  handshakes: number[];
  /** rate is new connections in a second, from counters; undefined at first. */
  rate?: number;
  /** search is what a search looks at. */
  search: string;
}

export type Column = "name" | "health" | "type" | "endpoints" | "rate" | "handshake" | "active" | "refused" | "dropped";

/** ServiceTable has the Services of the selected nodes. */
export class ServiceTable {
  rows: Row[] = [];
  private before = new Map<string, { connections: number; at: number }>();

  clear() {
    this.rows = [];
    this.before.clear();
  }

  update(lists: { node: string; services: Service[] }[], at: number) {
    const rows = new Map<string, Row>();
    for (const { services } of lists) {
      for (const service of services) {
        const key = serviceKey(service);
        const row = rows.get(key);
        if (row) addCounters(row, service);
        else rows.set(key, newRow(key, service));
      }
    }
    const counted = new Map<string, { connections: number; at: number }>();
    for (const row of rows.values()) {
      const before = this.before.get(row.key);
      if (before && row.counted && at > before.at && row.connections >= before.connections) {
        row.rate = ((row.connections - before.connections) * 1000) / (at - before.at);
      }
      if (row.counted) counted.set(row.key, { connections: row.connections, at });
    }
    this.before = counted;
    this.rows = [...rows.values()];
  }
}

function newRow(key: string, service: Service): Row {
  // The ports of two families have the same endpoints, as a rule.
  const ports = new Map<string, number>();
  for (const p of service.ports) {
    const name = `${p.port}/${p.protocol}`;
    ports.set(name, Math.max(ports.get(name) ?? 0, p.endpointCount));
  }
  const names = portNames(service);
  const row: Row = {
    key,
    namespace: service.namespace,
    name: service.name,
    type: service.type,
    ports: names,
    endpoints: Math.max(0, ...ports.values()),
    problems: [],
    faults: [],
    served: service.ports.every((p) => p.dataplane !== ""),
    counted: false,
    connections: 0,
    active: 0,
    refused: 0,
    dropped: 0,
    handshakes: [],
    search: [key, service.type, names, ...service.ports.flatMap((p) => p.frontends.map((f) => f.address))].join(" ").toLowerCase(),
  };
  addCounters(row, service);
  return row;
}

function identity(f: Finding): string {
  return JSON.stringify([f.id, f.object?.port, f.object?.endpoint]);
}

/** wrong is how many findings and problems a Service has; a critical finding counts more than all others. */
export function wrong(row: Row): number {
  return row.faults.reduce((sum, f) => sum + (f.severity === "critical" ? 1000 : 1), row.problems.length + (row.served ? 0 : 1000));
}

/** healthText is the worst that is known of a Service, as the API's health. */
export function healthText(row: Row): string {
  if (!row.served) return "not served";
  return row.faults[0]?.id ?? (row.problems.length > 0 ? "problem" : "ok");
}

function addCounters(row: Row, service: Service) {
  row.problems.push(...service.problems);
  for (const f of faults(service.findings)) if (!row.faults.some((o) => identity(o) === identity(f))) row.faults.push(f);
  row.faults.sort((a, b) => Number(a.severity !== "critical") - Number(b.severity !== "critical"));
  for (const { counters } of service.ports) {
    if (!counters) continue;
    row.counted = true;
    row.connections += Number(counters.connections);
    row.active += Number(counters.active);
    row.refused += Number(counters.refused);
    row.dropped += Number(counters.dropped);
    counters.handshakeMsLog2.forEach((n, i) => (row.handshakes[i] = (row.handshakes[i] ?? 0) + Number(n)));
  }
}

/** rateOf is new connections in a second: of events if they arrive, else of counters. */
export function rateOf(row: Row, traffic: Traffic, second: number, live: boolean): number | undefined {
  const service = traffic.services.get(row.key);
  if (live) return service ? service.opened.rate(second) : 0;
  return row.rate;
}

/** handshakeOf is a quantile of handshake times in ms: of late by events, else of all by counters, which know whole ms. */
export function handshakeOf(row: Pick<Row, "key" | "handshakes">, traffic: Traffic, q: number): number | undefined {
  return traffic.services.get(row.key)?.handshakes.quantile(q) ?? quantile(row.handshakes, q, 1);
}

/** handshakeText is handshakeOf in words. */
export function handshakeText(row: Pick<Row, "key" | "handshakes">, traffic: Traffic, q: number): string | undefined {
  const time = handshakeOf(row, traffic, q);
  if (time === undefined) return undefined;
  return time < 1 && traffic.services.get(row.key)?.handshakes.quantile(q) === undefined ? "under 1 ms" : duration(time);
}

const endpointWords: Record<string, string> = { "endpoint-unanswered": "no answer", "endpoint-refuses": "refuses", silent: "no answer", reset: "refuses" };

/** failingEndpoints says of the endpoints of a Service that fail how they do, by findings and by events of late. */
export function failingEndpoints(traffic: Traffic, key: string, findings: Finding[], second: number): Map<string, string> {
  const found = new Map<string, string>();
  for (const f of traffic.failing.values()) if (f.service === key && f.fails(second)) found.set(f.endpoint, endpointWords[f.how]!);
  for (const f of faults(findings)) if (f.object?.endpoint) found.set(f.object.endpoint, endpointWords[f.id] ?? f.id);
  return found;
}

/** failingCounts is how many endpoints of each Service fail, of those with some. */
export function failingCounts(rows: Row[], traffic: Traffic, second: number): Map<string, number> {
  const counts = new Map<string, number>();
  const some = new Set([...traffic.failing.values()].map((f) => f.service));
  for (const r of rows) {
    if (!some.has(r.key) && r.faults.length === 0) continue;
    const n = failingEndpoints(traffic, r.key, r.faults, second).size;
    if (n > 0) counts.set(r.key, n);
  }
  return counts;
}

/** select returns the rows that contain every word of a search, sorted. */
export function select(rows: Row[], search: string, value: (row: Row) => number | string | undefined, descending: boolean): Row[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? rows.filter((r) => words.every((w) => r.search.includes(w))) : rows;
  const keyed = found.map((row) => ({ row, value: value(row) ?? -1 }));
  keyed.sort((a, b) => {
    const order = a.value < b.value ? -1 : a.value > b.value ? 1 : 0;
    return (descending ? -order : order) || (a.row.key < b.row.key ? -1 : 1);
  });
  return keyed.map((k) => k.row);
}

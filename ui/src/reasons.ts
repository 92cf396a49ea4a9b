/** Reason is what a reason of an event or a drop means. */
export interface Reason {
  words: string;
  /** runbook is the name of the page that says what to do. */
  runbook?: string;
  /** wanted: the configuration asks for it. */
  wanted?: boolean;
}

const drops = "SpillwayDrops";

// The agent sends the meaning of a drop; these are the words where it does not, and the
// runbooks.
const reasons: Record<string, Reason> = {
  snat_ports: { words: "The node has no free port towards the endpoint.", runbook: drops },
  no_snat_addr: { words: "The device towards the endpoint has no address.", runbook: drops },
  no_route: { words: "The node has no route to the endpoint.", runbook: drops },
  flow_table: { words: "The flow could not be stored: the flow table is full.", runbook: "SpillwayFlowTableFull" },
  no_backend: { words: "The endpoint was removed while it was chosen.", runbook: "SpillwayChangesWait" },
  rewrite: { words: "The kernel refused to change the packet.", runbook: drops },
  helper_answers: { words: "Too many ports of the server answer one request.", runbook: drops },
  no_flow: { words: "A TCP packet that is not a SYN, of no known connection.", runbook: drops },
  xfrm: { words: "An IPsec policy selects the packet, and a redirect would bypass IPsec.", runbook: "ipsec-with-ebpf" },
  icmp_rate: { words: "The answer would exceed the rate of ICMP errors.", runbook: drops },
  policy_local: { words: "The traffic policy is Local, and this node has no endpoint.", runbook: drops, wanted: true },
  source_range: { words: "The client is outside the Service's loadBalancerSourceRanges.", runbook: drops, wanted: true },
  rejected_silent: { words: "The Service has no endpoint, and the answer could not be sent.", runbook: drops, wanted: true },
  rejected_rst: { words: "The Service has no endpoint: the client got a TCP RST.", runbook: drops },
  rejected_icmp: { words: "The Service has no endpoint: the client got ICMP port unreachable.", runbook: drops },
  rejected_no_flow: { words: "A TCP packet of no known connection: the client got an RST.", runbook: drops },
  socket_refused: { words: "The Service has no endpoint: the program got ECONNREFUSED.", runbook: drops },
  socket_timed_out: { words: "A Local policy or a source range drops it: the program got ETIMEDOUT.", runbook: drops, wanted: true },
  fin: { words: "Both sides closed the connection." },
  rst: { words: "One side reset the connection." },
  timeout: { words: "No packet came for longer than the flow's timeout." },
  "endpoint gone": { words: "The endpoint was removed, and the next packet went to another one." },
  "socket closed": { words: "The program closed its socket, or connected it to another Service." },
  evicted: { words: "The kernel evicted the flow, because the flow table was full.", runbook: "SpillwayFlowTableFull" },
};

/** reasonOf returns what a reason means; meaning is the agent's own words, if it has some. */
export function reasonOf(name: string, meaning = ""): Reason {
  const known = reasons[name.toLowerCase()];
  const words = meaning ? meaning.charAt(0).toUpperCase() + meaning.slice(1).replace(/\.?$/, ".") : known?.words ?? "";
  return { ...known, words };
}

const refusals = new Set(["rejected_rst", "rejected_icmp", "rejected_silent", "source_range", "policy_local", "socket_refused", "socket_timed_out"]);

/** refuses reports that a Service did not serve a client; other reasons drop packets of clients that it serves. */
export function refuses(name: string): boolean {
  return refusals.has(name.toLowerCase().replace(/^drop_/, ""));
}

/** faults are the findings that are a fault: info may be intended. */
export function faults<F extends { severity: string }>(list: F[]): F[] {
  return list.filter((f) => f.severity !== "info");
}

/** runbookOf is the runbook of a finding, by the address of its documentation or its id. */
export function runbookOf(finding: { id: string; documentation: string }): string {
  const found = finding.documentation.match(/runbooks\/([A-Za-z0-9-]+)(?:\.md|\/)?(?:#.*)?$/);
  return found?.[1] ?? finding.id;
}

/** runbooks are the names of all runbooks that reasons have. */
export function runbooks(): string[] {
  return Object.values(reasons).flatMap((r) => r.runbook ?? []);
}

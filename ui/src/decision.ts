import { inPrefix, isAddressOrPrefix } from "./address";
import { EventKind, Protocol } from "./gen/spillway/node/v1alpha1/node_pb";
import type { Endpoint, Flow, FlowEvent, Frontend, Service, ServicePort } from "./gen/spillway/node/v1alpha1/node_pb";
import { reasonOf } from "./reasons";
import { bytes, count, countsBytes, duration, flowService, hostPort, milliseconds, peer, plural, portName, protocol } from "./text";
import { failure } from "./traffic";

/** Step is one part of the decision about a flow, in words. */
export interface Step {
  mood: "good" | "warn" | "bad" | "calm";
  title: string;
  text: string;
}

/**
 * decide says step by step how a flow came to its endpoint, or why it did not. service is
 * what the flow's node holds now; undefined: it could not be read.
 */
export function decide(event: FlowEvent, service: Service | undefined, meaning = ""): Step[] {
  const flow = event.flow;
  if (!flow) return [];
  const steps: Step[] = [client(event)];
  const found = service && portOf(service, event);
  steps.push(lookup(event, service !== undefined, found));
  if (found) {
    const range = ranges(event, found.frontend);
    if (range) steps.push(range);
    if (range?.mood !== "bad") steps.push(candidates(event, found.port, found.frontend));
  }
  steps.push(...choice(event, found?.port));
  steps.push(outcome(event, meaning));
  return steps;
}

function client(event: FlowEvent): Step {
  const { client: c, serviceAddress: asked, protocol: p } = event.flow!;
  const from = c?.pod ? `Pod ${c.pod} (${peer(c)})` : peer(c);
  const on = c?.node ? ` on node ${c.node}` : c?.pod ? "" : ", which is no known pod,";
  return { mood: "calm", title: "The client asked", text: `${from}${on} asked for ${peer(asked)} over ${protocol(p)}.` };
}

/**
 * traceCommand shows the decision anew, with the kernel's maps and a probe. Text that is
 * no address is in no command.
 */
export function traceCommand(flow: Flow): string {
  const [from, to] = [flow.client?.address ?? "", flow.serviceAddress];
  const known = flow.protocol === Protocol.TCP || flow.protocol === Protocol.UDP;
  if (!known || !to || !isAddressOrPrefix(from) || !isAddressOrPrefix(to.address) || (from + to.address).includes("/")) return "";
  const udp = flow.protocol === Protocol.UDP ? " --protocol udp" : "";
  return `spillway trace --from ${from} --to ${hostPort(to.address, to.port)}${udp}`;
}

/** portOf finds the port and the frontend that a flow asked for. */
function portOf(service: Service, event: FlowEvent): { port: ServicePort; frontend: Frontend } | undefined {
  const { serviceAddress: asked, protocol: p } = event.flow!;
  if (!asked) return undefined;
  let everyAddress: { port: ServicePort; frontend: Frontend } | undefined;
  for (const port of service.ports) {
    if (port.protocol !== p) continue;
    for (const frontend of port.frontends) {
      if (frontend.port !== asked.port) continue;
      if (frontend.address === asked.address) return { port, frontend };
      const six = asked.address.includes(":");
      if (frontend.address === "" && (port.family === "" || (port.family === "IPv6") === six)) everyAddress = { port, frontend };
    }
  }
  return everyAddress;
}

const frontendNames: Record<string, string> = {
  clusterIP: "cluster IP",
  externalIP: "external IP",
  loadBalancerIP: "load balancer address",
  nodePort: "node port",
};

function lookup(event: FlowEvent, read: boolean, found: { port: ServicePort; frontend: Frontend } | undefined): Step {
  const key = flowService(event.flow!);
  const title = "It is an address of a Service";
  if (!read) return { mood: "warn", title, text: `The node took it for Service ${key}. What it is now is not known: it was deleted since, or could not be read.` };
  if (!found) {
    return { mood: "warn", title, text: `The node took it for Service ${key}. It does not hold this address now: the Service was changed or deleted since.` };
  }
  const kind = frontendNames[found.frontend.kind] ?? found.frontend.kind;
  const served = found.port.dataplane ? `The ${found.port.dataplane} dataplane serves it.` : "No dataplane serves it.";
  return { mood: "good", title, text: `The ${kind} of Service ${key}, port ${portName(found.port)}. ${served}` };
}

function ranges(event: FlowEvent, frontend: Frontend): Step | undefined {
  if (frontend.sourceRanges.length === 0) return undefined;
  const address = event.flow!.client?.address ?? "";
  const list = frontend.sourceRanges.join(", ");
  const match = frontend.sourceRanges.find((range) => inPrefix(address, range));
  const title = "Source ranges decide which clients may connect";
  if (match) return { mood: "good", title, text: `${address} is in ${match}: it may connect.` };
  return { mood: "bad", title, text: `${address} is in none of ${list}: it may not connect.` };
}

const inside = new Set(["clusterIP"]);

function candidates(event: FlowEvent, port: ServicePort, frontend: Frontend): Step {
  const internal = inside.has(frontend.kind) || !!event.flow!.client?.pod;
  const policy = (internal ? port.internalTrafficPolicy : port.externalTrafficPolicy) || "Cluster";
  const used = port.endpoints.filter((e) => e.inUse);
  const out = port.endpoints.length - used.length;
  const title = "The node's endpoints";
  const rule = `${internal ? "internalTrafficPolicy" : "externalTrafficPolicy"} is ${policy}.`;
  const affinity = port.affinity ? ` Session affinity keeps a client at its endpoint for ${duration(milliseconds(port.affinity))}.` : "";
  if (used.length === 0) return { mood: "bad", title, text: `No endpoint gets new connections on this node. ${rule}` };
  const others = out > 0 ? ` ${plural(out, "other")} ${out === 1 ? "is" : "are"} not ready, ends, or is left to other nodes.` : "";
  return { mood: "good", title, text: `${plural(used.length, "endpoint")} of ${count(port.endpoints.length)} ${used.length === 1 ? "gets" : "get"} new connections on this node.${others} ${rule}${affinity}` };
}

function choice(event: FlowEvent, port: ServicePort | undefined): Step[] {
  const flow = event.flow!;
  if (!flow.endpoint) return [{ mood: "calm", title: "No endpoint was chosen", text: "The decision ended before." }];
  const now = port?.endpoints.find((e) => e.address === flow.endpoint!.address && e.port === flow.endpoint!.port);
  const name = flow.endpoint.pod ? `Pod ${flow.endpoint.pod} (${peer(flow.endpoint)})` : peer(flow.endpoint);
  const how = flow.bySocket
    ? "The socket hooks chose it when the program connected: no packet is translated."
    : flow.oneWay
    ? `The endpoint's node answers the client itself: no reply passes node ${flow.node}.`
    : flow.dsr
    ? `Node ${flow.node} answers the client itself. Another node received the connection.`
    : `Node ${flow.node} translates each packet of the flow.`;
  const why = port?.affinity ? "by session affinity or at random" : "at random among these";
  const steps: Step[] = [{ mood: "good", title: "One endpoint was chosen", text: `${name}${flow.endpoint.node ? ` on node ${flow.endpoint.node}` : ""}, ${why}. ${how}` }];
  if (port && !now?.inUse) steps.push({ mood: "warn", title: "The endpoint has changed since", text: state(now) });
  return steps;
}

function state(e: Endpoint | undefined): string {
  if (!e) return "The Service does not have this endpoint any more. Flows that exist stay with it until they end.";
  if (e.terminating) return "The endpoint is terminating. It keeps its flows and gets no new ones.";
  if (!e.ready) return "The endpoint is not ready. It keeps its flows and gets no new ones.";
  return "The endpoint gets no new connections from this node.";
}

function outcome(event: FlowEvent, meaning: string): Step {
  const flow = event.flow!;
  const reason = reasonOf(event.reason, meaning);
  const named = event.reason ? `${reason.words} (${event.reason})`.trim() : "";
  const moved = countsBytes(flow) ? `${bytes(flow.bytesToEndpoint)} to the endpoint, ${bytes(flow.bytesToClient)} to the client` : "How many bytes is not known";
  const answered = flow.handshake ? `It answered after ${duration(milliseconds(flow.handshake))}.` : "";
  switch (event.kind) {
    case EventKind.REFUSED:
      return { mood: reason.wanted ? "warn" : "bad", title: "It was refused", text: named || "The agent does not say why." };
    case EventKind.DROPPED:
      return { mood: reason.wanted ? "warn" : "bad", title: "It was dropped", text: named || "The agent does not say why." };
    case EventKind.CLOSED:
      if (failure(event) === "reset") {
        const at = hostPort(flow.endpoint!.address, flow.endpoint!.port);
        return { mood: "bad", title: "The endpoint refused it", text: `${at} answered the first packet with an RST. Check that its process listens on this port.` };
      }
      if (failure(event) === "silent") {
        const at = hostPort(flow.endpoint!.address, flow.endpoint!.port);
        return { mood: "bad", title: "The endpoint did not answer", text: `${plural(Number(flow.packetsToEndpoint), "packet")} went to ${at}, and none came back. Check that its process listens, and that no NetworkPolicy drops the packets.` };
      }
      return { mood: event.reason.toLowerCase() === "rst" ? "warn" : "good", title: "It ended", text: [named, answered, `${moved}.`].filter(Boolean).join(" ") };
    case EventKind.ANSWERED:
      return { mood: "good", title: "The endpoint answered", text: answered || "The agent did not see how long it took." };
  }
  return { mood: "calm", title: "It is open", text: [answered || "No answer was seen when this event was sent.", `${moved}.`].join(" ") };
}

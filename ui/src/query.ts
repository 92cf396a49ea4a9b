import type { MessageInitShape } from "@bufbuild/protobuf";
import { isAddressOrPrefix } from "./address";
import type { EventKind, FlowFilterSchema } from "./gen/spillway/node/v1alpha1/node_pb";

/** FlowQuery is the filter of the view Flows, as the reader types it. */
export interface FlowQuery {
  /** service is NAMESPACE/NAME, or NAMESPACE/ for all of one. */
  service: string;
  pod: string;
  address: string;
  port: string;
  kinds: EventKind[];
}

export const noQuery: FlowQuery = { service: "", pod: "", address: "", port: "", kinds: [] };

export function isEmpty(q: FlowQuery): boolean {
  return !q.service.trim() && !q.pod.trim() && !q.address.trim() && !q.port.trim() && q.kinds.length === 0;
}

/** toFilter returns the filter for the agent, or what is wrong with the query. */
export function toFilter(q: FlowQuery): { filter: MessageInitShape<typeof FlowFilterSchema>; problem: string } {
  const filter: MessageInitShape<typeof FlowFilterSchema> = { kinds: q.kinds };
  const service = q.service.trim();
  if (service) {
    const [namespace, name, more] = service.split("/");
    if (name === undefined || more !== undefined || !namespace) {
      return { filter, problem: "Write a Service as NAMESPACE/NAME, or NAMESPACE/ for all of one." };
    }
    filter.namespace = namespace;
    filter.service = name;
  }
  const pod = q.pod.trim();
  if (pod && pod.split("/").filter(Boolean).length !== 2) return { filter, problem: "Write a pod as NAMESPACE/NAME." };
  filter.pod = pod;
  const address = q.address.trim();
  if (address && !isAddressOrPrefix(address)) return { filter, problem: "Write an address such as 10.0.0.7, or a prefix such as 10.0.0.0/8." };
  filter.address = address;
  const port = q.port.trim();
  if (port) {
    if (!/^\d{1,5}$/.test(port) || Number(port) < 1 || Number(port) > 65535) return { filter, problem: "A port is a number from 1 to 65535." };
    filter.port = Number(port);
  }
  return { filter, problem: "" };
}

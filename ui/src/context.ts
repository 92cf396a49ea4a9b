import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Cluster } from "./cluster";
import type { FlowQuery } from "./query";
import type { FlowEvent } from "./gen/spillway/node/v1alpha1/node_pb";

export const views = [
  { id: "overview", title: "Overview" },
  { id: "services", title: "Services" },
  { id: "map", title: "Map" },
  { id: "flows", title: "Flows" },
  { id: "drops", title: "Drops" },
  { id: "findings", title: "Findings" },
] as const;

export type View = (typeof views)[number]["id"];

/** Detail is what the panel shows. */
export type Detail =
  | { kind: "service"; namespace: string; name: string }
  | { kind: "flow"; event: FlowEvent; id: number | string }
  | { kind: "runbook"; name: string };

export interface App {
  cluster: Cluster;
  view: View;
  detail?: Detail;
  go: (view: View) => void;
  /** open shows a detail; from within the panel, closing it leads back. */
  open: (detail: Detail, within?: boolean) => void;
  close: () => void;
  /** query is the filter of the view Flows. */
  query: FlowQuery;
  setQuery: (query: FlowQuery) => void;
}

export const AppContext = createContext<App>(undefined as unknown as App);

export function useApp(): App {
  return useContext(AppContext);
}

import { Code, ConnectError, createClient } from "@connectrpc/connect";
import type { Client, Interceptor } from "@connectrpc/connect";
import { createConnectTransport } from "@connectrpc/connect-web";
import { NodeService } from "./gen/spillway/node/v1alpha1/node_pb";
import { shown } from "./text";

export type NodeClient = Client<typeof NodeService>;

/** NodeInfo is a node of /api/nodes. */
export interface NodeInfo {
  /** id is the node's alone, for ever. */
  id: number;
  name: string;
  address: string;
  flows: string;
}

/** A call that is not answered in so many ms has failed, and is made again: none waits for ever. */
const patience = 10_000;

const place = "spillway-token";

/**
 * takeToken takes the token out of the page's address, so that it is in no bookmark or
 * screenshot. It stays for a reload of this tab.
 */
function takeToken(): string {
  const found = location.hash.match(/^#token=([A-Za-z0-9]+)$/);
  if (found) {
    sessionStorage.setItem(place, found[1]!);
    history.replaceState(null, "", "#/overview");
  }
  return sessionStorage.getItem(place) ?? "";
}

/** Api calls the agents by way of the program that served the page. */
export class Api {
  private readonly token = takeToken();
  private readonly interceptors: Interceptor[] = [
    (next) => (request) => {
      request.header.set("Authorization", `Bearer ${this.token}`);
      return next(request);
    },
  ];
  /** all watches the flows of every node. */
  readonly all: NodeClient = this.client("/api/nodes");

  private client(path: string): NodeClient {
    return createClient(
      NodeService,
      createConnectTransport({ baseUrl: location.origin + path, useBinaryFormat: true, interceptors: this.interceptors, defaultTimeoutMs: patience }),
    );
  }

  node(id: number): NodeClient {
    return this.client(`/api/node/${id}`);
  }

  /** nodes lists the nodes. lacks is what the list lacks, or why it is old. */
  async nodes(): Promise<{ version: string; lacks: string; nodes: NodeInfo[] }> {
    const answer = await fetch("/api/nodes", { headers: { Authorization: `Bearer ${this.token}` }, signal: AbortSignal.timeout(patience) });
    if (answer.status === 401) throw new ConnectError("", Code.Unauthenticated);
    if (!answer.ok) throw new ConnectError(await answer.text(), Code.Unavailable);
    return answer.json();
  }

  async runbook(name: string): Promise<string> {
    const answer = await fetch(`/runbooks/${encodeURIComponent(name)}`, { signal: AbortSignal.timeout(patience) });
    if (!answer.ok) throw new Error(`There is no runbook ${shown(name)}.`);
    return answer.text();
  }
}

/** explain says in words why a call failed. */
export function explain(error: unknown): string {
  const e = ConnectError.from(error);
  if (error instanceof TypeError || e.cause instanceof TypeError) return "The program spillway ui has ended. Start it again, and open the address that it prints.";
  if (error instanceof DOMException && error.name === "TimeoutError") return "The program spillway ui does not answer in time.";
  switch (e.code) {
    case Code.Unauthenticated:
      return "This address has no key. Open the address that spillway ui printed.";
    case Code.Unimplemented:
      return "This agent is older than the page: it does not know this call.";
    case Code.DeadlineExceeded:
      return "The agent accepts calls but does not answer in time.";
    case Code.Unavailable:
      return shown(e.rawMessage) || "The node does not answer.";
    default:
      return `${shown(e.rawMessage)}.`.replace(/\.\.$/, ".");
  }
}

/** refused reports that a call would fail again. */
export function refused(error: unknown): boolean {
  return [Code.Unauthenticated, Code.Unimplemented, Code.InvalidArgument].includes(ConnectError.from(error).code);
}

import { useMemo } from "preact/hooks";
import { nodeName } from "../cluster";
import { useApp } from "../context";
import type { Counters, Endpoint, Service, ServicePort } from "../gen/spillway/node/v1alpha1/node_pb";
import { Chip, Message, Name, Panel } from "../parts/basics";
import { Chart } from "../parts/chart";
import { useSource, useTick } from "../parts/hooks";
import { Poll } from "../poll";
import { noQuery } from "../query";
import { failingEndpoints, handshakeText } from "../services";
import { bytes, count, duration, hostPort, milliseconds, plural, portName, serviceKey, shown } from "../text";
import type { Counts, Failure, ServiceTraffic } from "../traffic";
import { knownOnly, nowSecond, seconds } from "../traffic";

const lines = [
  { name: "opened", color: "--blue", fill: true },
  { name: "failed", color: "--red" },
];

/** ServiceDetail shows one Service as each selected node holds it. */
export function ServiceDetail({ namespace, name }: { namespace: string; name: string }) {
  const app = useApp();
  const { cluster } = app;
  // Ten nodes are enough to compare.
  const poll = useMemo(() => new Poll(() => cluster.call((c) => c.getService({ namespace, name, countFlows: true }), cluster.scope.slice(0, 10)), 3000), [namespace, name, cluster.selected]);
  useSource(poll);
  useTick(1000);
  const key = `${namespace}/${name}`;
  const second = nowSecond() - 1; // events of the last second are on the way
  const traffic = cluster.traffic.services.get(key);
  const data = useMemo(() => {
    const times = Array.from({ length: seconds }, (_, i) => second - seconds + i);
    return [times, knownOnly(times, traffic?.opened.series(second, seconds) ?? times.map(() => 0), cluster.reported), traffic?.bad.series(second, seconds) ?? times.map(() => 0)];
  }, [second, traffic]);
  const results = poll.value ?? [];
  const first = results.find((r) => r.value?.service);
  const failed = results.find((r) => r.error);
  const failing = failingEndpoints(cluster.traffic, key, results.flatMap((r) => r.value?.service?.findings ?? []), second);

  return (
    <Panel title={key} onClose={app.close}>
      {poll.error && <Message title="The Service cannot be read" mood="bad"><p>{shown(poll.error)}</p></Message>}
      {results.length > 0 && !first && failed && <Message title="The Service cannot be read" mood="bad"><p>{shown(failed.error)}</p></Message>}
      <Chart label={`Connections of ${shown(key)} in the last minute`} lines={lines} data={data} height={120} />
      {traffic && <Failed traffic={traffic} second={second} />}
      {first && <Whole service={first.value!.service!} flows={flowsByEndpoint(results.map((r) => r.value?.service))} failing={failing} />}
      {results.map((r) => <Differences key={r.node.id} node={nodeName(r.node)} service={r.value?.service} />)}
      <p>
        <button
          type="button"
          onClick={() => {
            app.setQuery({ ...noQuery, service: key });
            app.go("flows");
          }}
        >
          Show its flows
        </button>
      </p>
    </Panel>
  );
}

const failureWords = { silent: "not answered", reset: "reset by the endpoint", refused: "refused", dropped: "dropped" };

/** Failed says how the connections of the last minute failed. */
function Failed({ traffic, second }: { traffic: ServiceTraffic; second: number }) {
  const sum = (c: Counts) => c.series(second, seconds).reduce((a, b) => a + b, 0);
  const failed = Object.entries(traffic.failed).map(([how, c]) => ({ how: how as Failure, n: sum(c) })).filter((f) => f.n > 0);
  if (failed.length === 0) return <p class="soft">No event of a failure in the last minute.</p>;
  return <p class="bad">Failed in the last minute: {failed.map((f) => `${count(f.n)} ${failureWords[f.how]}`).join(", ")}.</p>;
}

function Differences({ node, service }: { node: string; service?: Service }) {
  const list = service?.ports.flatMap((p) => p.differences.map((d) => `${portName(p)}: ${d}`)) ?? [];
  const problems = service?.problems ?? [];
  const findings = service?.findings ?? [];
  if (list.length === 0 && problems.length === 0 && findings.length === 0) return null;
  return (
    <section class="note warn">
      <h3>{shown(node)}</h3>
      {problems.map((p, i) => <p key={i}>{shown(p.what)}</p>)}
      {findings.map((f, i) => <p key={i}>{shown(f.title)}</p>)}
      {list.length > 0 && <p>The kernel does not hold what is wanted:</p>}
      {list.length > 0 && <ul>{list.map((d) => <li key={d}>{shown(d)}</li>)}</ul>}
    </section>
  );
}

function Whole({ service, ...of }: { service: Service } & EndpointFacts) {
  const several = new Set(service.ports.map(portName)).size > 1;
  return (
    <>
      {service.ports.map((p, i) => <Port key={i} port={p} service={several ? "" : serviceKey(service)} type={service.type} {...of} />)}
    </>
  );
}

function Port({ port: p, service, type, ...of }: { port: ServicePort; service: string; type: string } & EndpointFacts) {
  const { cluster } = useApp();
  const c = p.counters;
  const handshakes = c?.handshakeMsLog2.map(Number) ?? [];
  // Events do not tell ports apart here, so a Service of several has the counters of each.
  const all = { key: service, handshakes };
  const p50 = handshakeText(all, cluster.traffic, 0.5);
  const same = p.compared && p.differences.length === 0;
  return (
    <section>
      <h3>{shown(portName(p))} <span class="soft">{shown(p.family)}</span> {same && <Chip mood="good">kernel agrees</Chip>}{!p.dataplane && <Chip mood="bad">not served</Chip>}</h3>
      <dl class="facts">
        <dt>Addresses</dt>
        <dd>
          <ul class="plain">
            {p.frontends.map((f, i) => (
              <li key={i}>
                <code>{f.address ? shown(hostPort(f.address, f.port)) : `every node address, port ${f.port}`}</code> <span class="soft">{shown(f.kind)}</span>
                {f.sourceRanges.length > 0 && <span> only from {f.sourceRanges.map(shown).join(", ")}</span>}
              </li>
            ))}
          </ul>
        </dd>
        <dt>Policies</dt>
        <dd>internal {shown(p.internalTrafficPolicy || "Cluster")}{type !== "ClusterIP" && `, external ${shown(p.externalTrafficPolicy || "Cluster")}`}{p.affinity && `, affinity ${duration(milliseconds(p.affinity))}`}</dd>
        <dt>Dataplane</dt>
        <dd>{shown(p.dataplane) || "none"}{p.helper && `, helper ${shown(p.helper)}`}{p.forwarding && `, forwarding ${shown(p.forwarding)}`}</dd>
        {c && (
          <>
            <dt>Counted</dt>
            <dd>{plural(Number(c.connections), "connection")}, {count(c.active)} active{c.refused > 0n && <span class="warn">, {count(c.refused)} refused</span>}{c.dropped > 0n && <span class="bad">, {plural(Number(c.dropped), "packet")} dropped</span>}</dd>
            <dt>Traffic</dt>
            <dd>{trafficText(c)}</dd>
            {p50 !== undefined && <><dt>Handshake</dt><dd>median {p50}, p99 {handshakeText(all, cluster.traffic, 0.99)}</dd></>}
          </>
        )}
      </dl>
      <Endpoints port={p} {...of} />
    </section>
  );
}

/** trafficText is what counters know of packets: none are counted of connections that sockets translate. */
function trafficText(c: Counters) {
  const none = c.packetsToEndpoint + c.packetsToClient + c.bytesToEndpoint + c.bytesToClient === 0n;
  if (!c.connectionsOnly && !(none && c.connections > 0n)) return `${bytes(c.bytesToEndpoint)} in, ${bytes(c.bytesToClient)} out`;
  return <>not known <span class="soft">{c.connectionsOnly ? "The agent counts connections only: --service-metrics." : "Packets of sockets' own connections are not counted."}</span></>;
}

/** Flows are the numbers of flows to an endpoint on all nodes that count them. */
type Flows = { answered: bigint; waiting: bigint };

const endpointKey = (p: ServicePort, e: Endpoint) => `${p.protocol} ${p.name} ${hostPort(e.address, e.port)}`;

function flowsByEndpoint(services: (Service | undefined)[]): Map<string, Flows> {
  const sums = new Map<string, Flows>();
  for (const p of services.flatMap((s) => s?.ports ?? [])) {
    for (const e of p.endpoints) {
      if (!e.flows) continue;
      const key = endpointKey(p, e);
      const sum = sums.get(key) ?? { answered: 0n, waiting: 0n };
      sums.set(key, { answered: sum.answered + e.flows.answered, waiting: sum.waiting + e.flows.waiting });
    }
  }
  return sums;
}

function flowsText(flows?: Flows) {
  if (!flows) return "–";
  const all = count(Number(flows.answered + flows.waiting));
  return flows.waiting > 0n ? `${all}, ${count(Number(flows.waiting))} wait` : all;
}

const shownEndpoints = 100;

/** EndpointFacts is what all nodes and the events know about a Service's endpoints. */
interface EndpointFacts {
  flows: Map<string, Flows>;
  failing: Map<string, string>;
}

function Endpoints({ port, flows, failing }: { port: ServicePort } & EndpointFacts) {
  const { endpoints: list, endpointCount: total } = port;
  if (list.length === 0) return <p class="warn">{total > 0 ? "The agent did not list its endpoints." : "It has no endpoint: clients are refused."}</p>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Endpoints">
      <table>
        <thead>
          <tr><th scope="col">Endpoint</th><th scope="col">Pod</th><th scope="col">Node</th><th scope="col">State</th><th scope="col">Flows</th></tr>
        </thead>
        <tbody>
          {list.slice(0, shownEndpoints).map((e) => {
            const at = hostPort(e.address, e.port);
            return (
              <tr key={at}>
                <td><code>{shown(at)}</code></td>
                <td><Name text={e.pod || "–"} /></td>
                <td><Name text={e.node || "–"} /></td>
                <td>{failing.has(at) ? <Chip mood="bad">{failing.get(at)}</Chip> : <State e={e} />}</td>
                <td>{flowsText(flows.get(endpointKey(port, e)))}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {list.length > shownEndpoints && <p class="soft">{count(list.length - shownEndpoints)} more.</p>}
    </div>
  );
}

function State({ e }: { e: Endpoint }) {
  if (e.inUse) return <Chip mood="good">in use</Chip>;
  if (e.terminating) return <Chip mood="soft">terminating</Chip>;
  if (!e.ready) return <Chip mood="warn">not ready</Chip>;
  return <Chip mood="soft">not from this node</Chip>;
}

import { useMemo } from "preact/hooks";
import { nodeName } from "../cluster";
import { useApp } from "../context";
import { decide, traceCommand } from "../decision";
import type { FlowEvent } from "../gen/spillway/node/v1alpha1/node_pb";
import { Command, Panel } from "../parts/basics";
import { useSource } from "../parts/hooks";
import { Poll } from "../poll";
import { reasonOf } from "../reasons";
import { noQuery } from "../query";
import { bytes, clock, count, countsBytes, flowService, peer, protocol, shown, span } from "../text";

/** FlowDetail says why a flow went where it went. */
export function FlowDetail({ event }: { event: FlowEvent }) {
  const app = useApp();
  const { cluster } = app;
  const flow = event.flow!;
  const nodes = cluster.nodes.filter((n) => nodeName(n) === flow.node);
  const asked = nodes.length > 0 ? nodes : cluster.scope.slice(0, 1);
  const poll = useMemo(
    () => new Poll(async () => (await cluster.call((c) => c.getService({ namespace: flow.namespace, name: flow.service }), asked))[0], 5000),
    [event],
  );
  useSource(poll, cluster.drops);
  const service = poll.value?.value?.service;
  const meaning = cluster.drops.value?.drops.find((d) => d.reason === event.reason)?.meaning ?? "";
  const reason = event.reason ? reasonOf(event.reason, meaning) : undefined;
  const steps = decide(event, service, meaning);
  const key = flowService(flow);
  const trace = traceCommand(flow);

  return (
    <Panel title={`Flow to ${key}`} onClose={app.close}>
      <h3>The decision</h3>
      {!service && !poll.value?.error ? (
        <p class="soft">Reading the Service …</p>
      ) : (
        <ol class="steps">
          {steps.map((s, i) => (
            <li key={i} class={s.mood}>
              <strong>{s.title}</strong>
              <span>{shown(s.text)}</span>
            </li>
          ))}
        </ol>
      )}
      {poll.value?.error && <p class="warn">{shown(poll.value.error)}</p>}
      <p class="buttons">
        {reason?.runbook && <button type="button" class="primary" onClick={() => app.open({ kind: "runbook", name: reason.runbook! }, true)}>Open the runbook</button>}
        <button type="button" onClick={() => app.open({ kind: "service", namespace: flow.namespace, name: flow.service }, true)}>Show the Service</button>
        <button
          type="button"
          onClick={() => {
            app.setQuery({ ...noQuery, address: flow.client?.address ?? "" });
            app.go("flows");
            app.close();
          }}
        >
          Flows of this client
        </button>
      </p>
      {trace && (
        <>
          <h3>Decide it again{flow.node && `, on ${shown(flow.node)}`}</h3>
          <Command text={trace} what="command that traces the decision" />
        </>
      )}
      <h3>The flow</h3>
      <dl class="facts">
        <dt>Time</dt><dd>{clock(event.time)}</dd>
        <dt>Node</dt><dd>{shown(flow.node) || "–"}</dd>
        <dt>Protocol</dt><dd>{protocol(flow.protocol)}{flow.state && <span class="soft"> {shown(flow.state)}</span>}</dd>
        <dt>Client</dt><dd><code>{shown(peer(flow.client))}</code> <span class="soft">{shown(flow.client?.pod ?? "")}</span></dd>
        <dt>Asked for</dt><dd><code>{shown(peer(flow.serviceAddress))}</code> <span class="soft">{shown(key)}</span></dd>
        <dt>Endpoint</dt><dd>{flow.endpoint ? <><code>{shown(peer(flow.endpoint))}</code> <span class="soft">{shown(flow.endpoint.pod)}</span></> : "none"}</dd>
        <dt>Handshake</dt><dd>{span(flow.handshake)}{flow.smoothedRtt && <span class="soft"> smoothed RTT {span(flow.smoothedRtt)}</span>}</dd>
        <dt>Packets</dt><dd>{countsBytes(flow) ? `${count(flow.packetsToEndpoint)} in, ${count(flow.packetsToClient)} out` : "not known"}</dd>
        <dt>Bytes</dt><dd>{countsBytes(flow) ? `${bytes(flow.bytesToEndpoint)} in, ${bytes(flow.bytesToClient)} out` : "not known"}</dd>
      </dl>
    </Panel>
  );
}

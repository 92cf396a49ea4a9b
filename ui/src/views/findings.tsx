import { nodeName } from "../cluster";
import { useApp } from "../context";
import type { Finding } from "../gen/spillway/node/v1alpha1/node_pb";
import { Chip, Command, Message } from "../parts/basics";
import { useSource } from "../parts/hooks";
import { runbookOf } from "../reasons";
import { plural, shown } from "../text";

const order = ["critical", "warning", "info"];
const moods: Record<string, string> = { critical: "bad", warning: "warn", info: "calm" };

/** FindingsView shows what doctor finds on the selected nodes, and how to fix it. */
export function FindingsView() {
  const { cluster } = useApp();
  const poll = cluster.findings;
  useSource(poll);
  const results = poll.value ?? [];
  const found = results.flatMap((r) => (r.value?.findings ?? []).map((finding) => ({ finding, node: nodeName(r.node) })));
  const rank = (severity: string) => (order.indexOf(severity) + order.length + 1) % (order.length + 1);
  found.sort((a, b) => rank(a.finding.severity) - rank(b.finding.severity));
  const problems = results.flatMap((r) => (r.value?.problems ?? []).map((problem) => ({ problem, node: nodeName(r.node) })));
  const failed = results.filter((r) => r.error);
  return (
    <>
      <div class="bar-of-view">
        <h1>Findings</h1>
        <button type="button" disabled={poll.busy} onClick={() => void poll.again()}>Check again</button>
        <span class="soft" role="status">{results.length === 0 ? "Checking …" : plural(found.length, "finding")}</span>
      </div>
      {poll.error && <p class="banner bad" role="alert">{shown(poll.error)}</p>}
      {failed.map((r) => <p key={r.node.id} class="banner warn" role="alert">{shown(nodeName(r.node))}: {shown(r.error)}</p>)}
      {results.length > 0 && found.length === 0 && failed.length === 0 && <Message title="No finding" mood="good"><p>The checks of doctor found nothing wrong.</p></Message>}
      <div class="findings">
        {found.map(({ finding, node }, i) => <Card key={`${node} ${finding.id} ${i}`} finding={finding} node={results.length > 1 ? node : ""} />)}
      </div>
      {problems.length > 0 && (
        <section class="note warn">
          <h2>Could not be checked</h2>
          <ul>{problems.map(({ problem, node }, i) => <li key={i}>{shown(results.length > 1 ? `${node}: ` : "")}{shown(problem.where)}: {shown(problem.what)}</li>)}</ul>
        </section>
      )}
    </>
  );
}

function Card({ finding: f, node }: { finding: Finding; node: string }) {
  const app = useApp();
  return (
    <article class={`card finding ${moods[f.severity] ?? "calm"}`} aria-label={shown(f.title)}>
      <header>
        <Chip mood={moods[f.severity] ?? "soft"}>{shown(f.severity)}</Chip>
        <h2>{shown(f.title)}</h2>
        {node && <span class="soft">{shown(node)}</span>}
      </header>
      <p>{shown(f.detail)}</p>
      {f.evidence.length > 0 && <ul class="evidence">{f.evidence.map((e, i) => <li key={i}><code>{shown(e)}</code></li>)}</ul>}
      {f.fix && <p><strong>Fix:</strong> {shown(f.fix)}</p>}
      {f.commands.length > 0 && <Command text={f.commands.join("\n")} what={`fix of ${f.id}`} />}
      <p class="buttons">
        <button type="button" aria-label={`Runbook for ${shown(f.id)}`} onClick={() => app.open({ kind: "runbook", name: runbookOf(f) })}>Runbook</button>
        <span class="soft"><code>{shown(f.id)}</code></span>
      </p>
    </article>
  );
}

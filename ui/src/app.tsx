import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { nodeName } from "./cluster";
import type { Cluster } from "./cluster";
import { AppContext, views } from "./context";
import type { App, Detail, View } from "./context";
import { useKeys, useSource } from "./parts/hooks";
import { Message } from "./parts/basics";
import { Runbook } from "./parts/runbook";
import { noQuery } from "./query";
import { shown } from "./text";
import { Drops } from "./views/drops";
import { FindingsView } from "./views/findings";
import { FlowDetail } from "./views/flow";
import { Flows } from "./views/flows";
import { ServiceMap } from "./views/map";
import { Overview } from "./views/overview";
import { ServiceDetail } from "./views/service";
import { Services } from "./views/services";

function viewOf(hash: string): View {
  return views.find((v) => hash === `#/${v.id}`)?.id ?? "overview";
}

const themes = ["auto", "light", "dark"] as const;

function useTheme() {
  const [theme, setTheme] = useState<string>(localStorage.getItem("spillway-theme") ?? "auto");
  useEffect(() => {
    localStorage.setItem("spillway-theme", theme);
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }, [theme]);
  return [theme, () => setTheme(themes[(themes.indexOf(theme as (typeof themes)[number]) + 1) % themes.length]!)] as const;
}

/** Page is the whole page. */
export function Page({ cluster }: { cluster: Cluster }) {
  useSource(cluster);
  const [view, setView] = useState<View>(viewOf(location.hash));
  const [details, setDetails] = useState<Detail[]>([]);
  const [query, setQuery] = useState(noQuery);
  const help = useRef<HTMLDialogElement>(null);

  useEffect(() => {
    const follow = () => {
      setView(viewOf(location.hash));
      setDetails([]);
    };
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);

  useEffect(() => {
    document.title = `${views.find((v) => v.id === view)!.title} – Spillway`;
  }, [view]);

  const app: App = {
    cluster,
    view,
    detail: details.at(-1),
    go: (to) => {
      location.hash = `#/${to}`;
    },
    open: (detail, within) => setDetails((d) => (within ? [...d, detail] : [detail])),
    close: () => setDetails((d) => d.slice(0, -1)),
    query,
    setQuery,
  };

  useKeys((e) => {
    const element = e.target as HTMLElement;
    if (e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(element.tagName)) return;
    const index = Number(e.key);
    if (index >= 1 && index <= views.length) app.go(views[index - 1]!.id);
    else if (e.key === "?") help.current?.showModal();
    else if (e.key === "/") {
      const search = document.querySelector<HTMLInputElement>("main input");
      if (!search) return;
      e.preventDefault();
      search.focus();
    }
  });

  const body = useMemo(() => {
    switch (view) {
      case "overview":
        return <Overview />;
      case "services":
        return <Services />;
      case "map":
        return <ServiceMap />;
      case "flows":
        return <Flows />;
      case "drops":
        return <Drops />;
      case "findings":
        return <FindingsView />;
    }
  }, [view, cluster.selected]);

  const detail = app.detail;
  return (
    <AppContext.Provider value={app}>
      <a class="skip" href="#main" onClick={(e) => (e.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the view
      </a>
      <Header cluster={cluster} view={view} onHelp={() => help.current?.showModal()} />
      <div class={detail ? "split open" : "split"}>
        <main id="main" tabIndex={-1}>
          {cluster.error && cluster.nodes.length === 0 ? (
            <Message title="The page cannot read anything" mood="bad"><p>{cluster.error}</p></Message>
          ) : (
            <>
              {cluster.error && <p class="banner bad" role="alert">{cluster.error} What you see is old.</p>}
              {cluster.lacks && <p class="banner warn" role="status">{shown(cluster.lacks)}</p>}
              {body}
            </>
          )}
        </main>
        {detail?.kind === "service" && <ServiceDetail key={`${detail.namespace}/${detail.name}`} namespace={detail.namespace} name={detail.name} />}
        {detail?.kind === "flow" && <FlowDetail key={detail.id} event={detail.event} />}
        {detail?.kind === "runbook" && (
          <Runbook api={cluster.api} name={detail.name} onOpen={(name) => app.open({ kind: "runbook", name }, true)} onClose={app.close} />
        )}
      </div>
      <dialog ref={help} aria-labelledby="help-title">
        <h2 id="help-title">Keys</h2>
        <dl class="keys">
          <dt><kbd>1</kbd> to <kbd>{views.length}</kbd></dt><dd>Show a view</dd>
          <dt><kbd>/</kbd></dt><dd>Search or filter</dd>
          <dt><kbd>↑</kbd> <kbd>↓</kbd> <kbd>Enter</kbd></dt><dd>Choose and open a row</dd>
          <dt><kbd>P</kbd></dt><dd>Pause or resume the flows</dd>
          <dt><kbd>Esc</kbd></dt><dd>Close the panel</dd>
          <dt><kbd>?</kbd></dt><dd>Show these keys</dd>
        </dl>
        <form method="dialog"><button>Close</button></form>
      </dialog>
    </AppContext.Provider>
  );
}

function Header({ cluster, view, onHelp }: { cluster: Cluster; view: View; onHelp: () => void }) {
  const [theme, nextTheme] = useTheme();
  const down = cluster.nodes.filter((n) => n.error).length;
  const mood = cluster.error || (down > 0 && down === cluster.nodes.length) ? "bad" : down > 0 ? "warn" : cluster.nodes.length === 0 ? "soft" : "good";
  const words = cluster.error ? "disconnected" : cluster.nodes.length === 0 ? "connecting" : down > 0 ? `${down} of ${cluster.nodes.length} do not answer` : "live";
  return (
    <header class="top">
      <div class="brand">
        <img src="icon.svg" alt="" width="22" height="22" />
        Spillway
      </div>
      <nav aria-label="Views">
        {views.map((v) => (
          <a key={v.id} href={`#/${v.id}`} aria-current={v.id === view ? "page" : undefined}>
            {v.title}
          </a>
        ))}
      </nav>
      <div class="tools">
        <span class={`state ${mood}`} role="status">{words}</span>
        {cluster.nodes.length > 1 && (
          <select aria-label="Node" value={cluster.selected} onChange={(e) => cluster.select(Number(e.currentTarget.value))}>
            <option value={-1}>All nodes</option>
            {cluster.nodes.map((n) => <option key={n.id} value={n.id}>{shown(nodeName(n))}</option>)}
          </select>
        )}
        <button type="button" onClick={nextTheme} aria-label={`Colors: ${theme}`} title={`Colors: ${theme}`}>
          {theme === "auto" ? "◐" : theme === "light" ? "☀" : "☾"}
        </button>
        <button type="button" onClick={onHelp} aria-label="Keys" title="Keys">?</button>
      </div>
    </header>
  );
}

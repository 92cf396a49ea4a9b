import { marked } from "marked";
import type { Token, Tokens } from "marked";
import type { ComponentChildren, VNode } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Api } from "../api";
import { Command, Message, Panel } from "./basics";

type Open = (name: string) => void;

/** Runbook shows a runbook, which the program carries with it. */
export function Runbook({ api, name, onOpen, onClose }: { api: Api; name: string; onOpen: Open; onClose: () => void }) {
  const [page, setPage] = useState<{ name: string; text?: string; error?: string }>();
  useEffect(() => {
    let shows = true;
    api.runbook(name).then(
      (text) => shows && setPage({ name, text }),
      (error: Error) => shows && setPage({ name, error: error.message }),
    );
    return () => {
      shows = false;
    };
  }, [name]);
  return (
    <Panel title={`Runbook: ${name}`} onClose={onClose}>
      {page?.name === name && page.error && <Message title="The runbook cannot be shown" mood="bad"><p>{page.error}</p></Message>}
      {page?.name === name && page.text && <Markdown text={page.text} onOpen={onOpen} />}
    </Panel>
  );
}

/** Markdown makes elements of a document. HTML in it is shown as text. */
export function Markdown({ text, onOpen }: { text: string; onOpen: Open }) {
  const tokens = marked.lexer(text);
  // The panel has the title.
  if (tokens[0]?.type === "heading") tokens.shift();
  return <div class="markdown">{tokens.map((t, i) => block(t, i, onOpen))}</div>;
}

function block(token: Token, key: number, onOpen: Open): ComponentChildren {
  const t = token as Tokens.Generic;
  switch (t.type) {
    case "heading":
      return <h3 key={key}>{inline(t.tokens, onOpen)}</h3>;
    case "paragraph":
      return <p key={key}>{inline(t.tokens, onOpen)}</p>;
    case "text":
      return t.tokens ? inline(t.tokens, onOpen) : decode(t.text);
    case "code":
      return <Command key={key} text={t.text} what="commands of the runbook" />;
    case "blockquote":
      return <blockquote key={key}>{(t.tokens ?? []).map((s, i) => block(s, i, onOpen))}</blockquote>;
    case "list": {
      const items = (t as Tokens.List).items.map((item, i) => <li key={i}>{item.tokens.map((s, j) => block(s, j, onOpen))}</li>);
      return t.ordered ? <ol key={key} start={t.start || 1}>{items}</ol> : <ul key={key}>{items}</ul>;
    }
    case "table":
      return table(t as Tokens.Table, key, onOpen);
    case "space":
    case "hr":
    case "def":
      return null;
  }
  return <p key={key}>{t.raw}</p>;
}

function table(t: Tokens.Table, key: number, onOpen: Open): VNode {
  return (
    <div class="scroll" key={key} tabIndex={0} role="region" aria-label="Table of the runbook">
      <table>
        <thead>
          <tr>{t.header.map((c, i) => <th key={i} scope="col">{inline(c.tokens, onOpen)}</th>)}</tr>
        </thead>
        <tbody>
          {t.rows.map((row, i) => (
            <tr key={i}>{row.map((c, j) => <td key={j}>{inline(c.tokens, onOpen)}</td>)}</tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function inline(tokens: Token[] | undefined, onOpen: Open): ComponentChildren {
  return (tokens ?? []).map((token, key) => {
    const t = token as Tokens.Generic;
    switch (t.type) {
      case "text":
      case "escape":
        return t.tokens ? inline(t.tokens, onOpen) : decode(t.text);
      case "codespan":
        return <code key={key}>{decode(t.text)}</code>;
      case "strong":
        return <strong key={key}>{inline(t.tokens, onOpen)}</strong>;
      case "em":
        return <em key={key}>{inline(t.tokens, onOpen)}</em>;
      case "br":
        return <br key={key} />;
      case "link":
        return <Link key={key} href={t.href} onOpen={onOpen}>{inline(t.tokens, onOpen)}</Link>;
    }
    return t.raw;
  });
}

/** Link opens another runbook here. Other documents are not in the program. */
function Link({ href, children, onOpen }: { href: string; children: ComponentChildren; onOpen: Open }) {
  const runbook = href.match(/^([A-Za-z0-9-]+)\.md(#.*)?$/);
  if (runbook && runbook[1] !== "index") {
    return <button type="button" class="link" onClick={() => onOpen(runbook[1]!)}>{children}</button>;
  }
  const path = href.replace(/^\.\.\//, "docs/").replace(/#.*$/, "");
  return <span class="document" title={path}>{children}</span>;
}

/** decode undoes the escapes that the lexer may leave in text. */
function decode(text: string): string {
  return text.replace(/&(lt|gt|quot|amp|#39);/g, (_, name: string) => ({ lt: "<", gt: ">", quot: '"', amp: "&", "#39": "'" })[name]!);
}

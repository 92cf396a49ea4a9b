import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { useKeys } from "./hooks";
import { shown, shownLines } from "../text";

/** Copy is a button that copies a text. */
export function Copy({ text, what }: { text: string; what: string }) {
  const [done, setDone] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(shownLines(text));
      setDone("Copied");
    } catch {
      setDone("Select the text to copy it");
    }
    setTimeout(() => setDone(""), 2000);
  };
  return (
    <button type="button" class="small" onClick={copy} aria-label={`Copy ${what}`}>
      <span aria-live="polite">{done || "Copy"}</span>
    </button>
  );
}

/** Command is a line for a shell, with a button that copies it. */
export function Command({ text, what = "command" }: { text: string; what?: string }) {
  return (
    <div class="command">
      <pre tabIndex={0} role="region" aria-label={what}>{shownLines(text)}</pre>
      <Copy text={text} what={what} />
    </div>
  );
}

/** Message fills a place that has nothing to show, and says why. */
export function Message({ title, children, mood = "calm" }: { title: string; children?: ComponentChildren; mood?: string }) {
  return (
    <div class={`message ${mood}`} role="status">
      <h2>{title}</h2>
      {children}
    </div>
  );
}

/** Chip is a word with a color of its meaning. */
export function Chip({ mood, children }: { mood: string; children: ComponentChildren }) {
  return <span class={`chip ${mood}`}>{children}</span>;
}

/** Name is text from elsewhere, cut where there is no room. Its namespace is less important. */
export function Name({ text, soft, namespace }: { text: string; soft?: boolean; namespace?: string }) {
  const safe = shown(text);
  const before = namespace ? `${shown(namespace)}/` : "";
  return (
    <span class={soft ? "name soft" : "name"} title={before + safe}>
      {before && <span class="soft">{before}</span>}
      {safe}
    </span>
  );
}

/** Panel shows the detail of a row beside the view. Escape closes it. */
export function Panel({ title, children, onClose }: { title: string; children: ComponentChildren; onClose: () => void }) {
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    const before = document.activeElement;
    return () => {
      if (before instanceof HTMLElement && before.isConnected) before.focus();
    };
  }, []);
  useEffect(() => heading.current?.focus(), [title]);
  useKeys((e) => {
    if (e.key === "Escape" && !e.defaultPrevented && !document.querySelector("dialog[open]")) onClose();
  });
  return (
    <aside class="panel" aria-label={shown(title)}>
      <header>
        <h2 tabIndex={-1} ref={heading}>{shown(title)}</h2>
        <button type="button" class="close" onClick={onClose} aria-label="Close">
          ×
        </button>
      </header>
      <div class="body">{children}</div>
    </aside>
  );
}

/** Meter is how full a table is. */
export function Meter({ name, used, size, label }: { name: string; used: number; size: number; label: string }) {
  const share = size > 0 ? used / size : 0;
  const mood = share >= 0.95 ? "bad" : share >= 0.8 ? "warn" : "calm";
  return (
    <div class="meter">
      <span class="name">{shown(name)}</span>
      <span class="soft number">{label}</span>
      <div class={`bar ${mood}`} role="meter" aria-label={`${shown(name)}: used`} aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(share * 100)}>
        <div style={{ width: `${Math.min(100, Math.max(share * 100, share > 0 ? 1 : 0))}%` }} />
      </div>
    </div>
  );
}

package ui

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"spillway.dev/spillway/internal/observe/web"
	"spillway.dev/spillway/test/browser"
	"spillway.dev/spillway/test/browser/ui/fakenode"
)

// Nodes of a cluster come and go without a reload, and a node without an agent says so.
func TestNodesOfAClusterComeAndGo(t *testing.T) {
	node := func(name string) web.Node {
		socket := filepath.Join(t.TempDir(), "api.sock")
		n := (&fakenode.Node{Name: name, Rate: 40, Healthy: true}).Start()
		listener := listen(t, socket)
		go func() { _ = n.Serve(t.Context(), listener) }()
		return web.Node{Name: name, Address: "kube-system/" + name, Dial: dialer(socket), OneConnection: true}
	}
	a, b := node("node-a"), node("node-b")
	bare := web.Node{Name: "node-c", Dial: func(context.Context) (net.Conn, error) { return nil, errors.New("none") },
		Explain: func(error) string { return "No agent runs on this node." }}
	type list struct {
		nodes []web.Node
		lacks string
	}
	var now atomic.Pointer[list]
	now.Store(&list{nodes: []web.Node{a, b, bare}})
	address, _ := serveConfig(t, web.Config{Refresh: func(context.Context) ([]web.Node, string, error) {
		l := now.Load()
		return l.nodes, l.lacks, nil
	}})
	tab := open(t, address, 1280)
	tab.Text("1 of 3 do not answer")
	tab.Text("No agent runs on this node.")
	for _, view := range []string{"flows", "services", "overview"} {
		show(tab, view)
	}
	tab.Until("both agents' cards", `[...document.querySelectorAll("article.card")].filter(c => c.textContent.includes("received")).length === 2`)
	if dir := os.Getenv("SPILLWAY_SCREENSHOTS"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, "cluster.png"), tab.Screenshot(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// The chosen node leaves the cluster: the page shows the others.
	tab.Run(`void (() => { const s = document.querySelector("header select"); s.value = [...s.options].find(o => o.text === "node-b").value; s.dispatchEvent(new Event("change", {bubbles: true})); })()`)
	tab.Until("one card", `document.querySelectorAll("article.card").length === 1`)
	now.Store(&list{nodes: []web.Node{a, bare}, lacks: "Some nodes are missing."})
	tab.Text("1 of 2 do not answer")
	tab.Text("Some nodes are missing.")
	tab.Until("all nodes are shown", `document.querySelector("header select").value === "-1" && document.querySelectorAll("article.card").length === 2`)
	now.Store(&list{nodes: []web.Node{a, b, bare}})
	tab.Text("1 of 3 do not answer")
	if browser.Eval[bool](tab, `document.body.textContent.includes("Some nodes are missing.")`) {
		t.Error("a list that lacks nothing says that it does")
	}
}

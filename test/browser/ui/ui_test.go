package ui

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"spillway.dev/spillway/docs"
	"spillway.dev/spillway/internal/observe/web"
	"spillway.dev/spillway/test/browser"
	"spillway.dev/spillway/test/browser/ui/fakenode"
	"spillway.dev/spillway/ui"
)

const token = "KEYOFTHETEST"

// serve serves the page with nodes, nil for one that does not exist, and returns its address.
func serve(t *testing.T, nodes ...*fakenode.Node) string {
	t.Helper()
	address, _ := serveUntil(t, nil, nodes...)
	return address
}

// serveSockets serves the page with sockets of other agents, and with nodes.
func serveSockets(t *testing.T, sockets []string, nodes ...*fakenode.Node) string {
	t.Helper()
	address, _ := serveUntil(t, sockets, nodes...)
	return address
}

// serveUntil is the same, and returns what ends the page's server.
func serveUntil(t *testing.T, sockets []string, nodes ...*fakenode.Node) (address string, end func()) {
	t.Helper()
	for i, n := range nodes {
		socket := filepath.Join(t.TempDir(), fmt.Sprint(i, ".sock"))
		if n != nil {
			n.Start()
			listener := listen(t, socket)
			go func() { _ = n.Serve(t.Context(), listener) }()
		}
		sockets = append(sockets, socket)
	}
	config := web.Config{}
	for _, socket := range sockets {
		config.Nodes = append(config.Nodes, web.Node{Address: socket, Dial: dialer(socket)})
	}
	return serveConfig(t, config)
}

func dialer(socket string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
}

// serveConfig serves the page with the nodes of a Config.
func serveConfig(t *testing.T, config web.Config) (address string, end func()) {
	t.Helper()
	config.Token, config.Version = token, "test"
	var err error
	if config.Page, err = fs.Sub(ui.Dist, "dist"); err != nil {
		t.Fatal(err)
	}
	if config.Runbooks, err = fs.Sub(docs.Runbooks, "runbooks"); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(web.Handler(config))
	end = sync.OnceFunc(func() {
		server.Listener.Close()
		server.CloseClientConnections()
		server.Close()
	})
	t.Cleanup(end)
	return server.URL, end
}

func listen(t *testing.T, socket string) net.Listener {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	return listener
}

// open opens the page. A script's error, or a breach of the page's policy, fails the test.
func open(t *testing.T, address string, width int) *browser.Tab {
	t.Helper()
	tab := browser.Open(t, width, 860)
	tab.Do(chromedp.Navigate(address + "/#token=" + token))
	t.Cleanup(func() {
		if errors := tab.Errors(); len(errors) > 0 {
			t.Errorf("errors of scripts: %s", strings.Join(errors, "\n"))
		}
	})
	return tab
}

var views = []struct{ id, ready string }{
	{"overview", "Needs attention"},
	{"services", "checkout"},
	{"map", "Numbers are new connections"},
	{"flows", "the newest first"},
	{"drops", "Latest"},
	{"findings", "Could not be checked"},
}

func show(tab *browser.Tab, view string) {
	tab.Run(fmt.Sprintf("void (location.hash = '#/%s')", view))
}

// filter shows events of one kind.
func filter(tab *browser.Tab, kind string) {
	tab.Click("button", kind)
	tab.Until("only events that were "+kind, fmt.Sprintf(
		`(rows => rows.length > 0 && rows.every(r => r.textContent === %q))([...document.querySelectorAll(".flows .rows .kind")])`, kind))
}

func theme(tab *browser.Tab, name string) {
	browser.Call(tab, emulation.SetEmulatedMedia,
		emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}})
}

// Pictures of all views, for people: SPILLWAY_SCREENSHOTS=DIR.
func TestPictures(t *testing.T) {
	dir := os.Getenv("SPILLWAY_SCREENSHOTS")
	if dir == "" {
		dir = t.TempDir()
	}
	address := serve(t, &fakenode.Node{Name: "node-a", Services: 400, Rate: 120})
	for _, width := range []int{1280, 390} {
		tab := open(t, address, width)
		picture := func(name, mode string) {
			theme(tab, mode)
			time.Sleep(300 * time.Millisecond) // for a picture of a settled page; nothing is asserted
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s-%s-%d.png", name, mode, width)), tab.Screenshot(), 0o644); err != nil {
				t.Fatal(err)
			}
			if wide := browser.Eval[int](tab, "document.documentElement.scrollWidth"); wide > width {
				t.Errorf("%s: the page is %d wide in a window of %d", name, wide, width)
			}
		}
		tab.Text("does not answer")
		tab.Text("conntrack table of the node is 97")
		for _, v := range views {
			show(tab, v.id)
			tab.Text(v.ready)
			picture(v.id, "light")
			picture(v.id, "dark")
		}
		show(tab, "services")
		tab.Click(".services [role=row] .name", "ledger")
		tab.Text("kernel agrees")
		picture("service", "light")
		picture("service", "dark")
		show(tab, "flows")
		if width < 640 {
			tab.Click("button.fold", "Filter")
		}
		filter(tab, "refused")
		tab.Click(".flows .rows .row", "refused")
		tab.Text("it may not connect")
		picture("flow", "light")
		picture("flow", "dark")
		tab.Click("button", "Open the runbook")
		tab.Text("Users see")
		picture("runbook", "light")
	}
}

const runAxe = `void (window.found = undefined, axe.run().then(r => (window.found = {passes: r.passes.length,
	faults: r.violations.flatMap(v => v.nodes.map(n => v.id + ": " + n.html.slice(0, 200) + ": " + n.failureSummary))})))`

// axe runs axe-core. chromium has lost the answer to a promise on a busy machine: it is asked for.
func axe(tab *browser.Tab) found {
	tab.Run(runAxe)
	tab.Until("axe-core", "window.found")
	return browser.Eval[found](tab, "window.found")
}

type found struct {
	Passes int
	Faults []string
}

// Screen readers and keyboards: axe-core finds no fault in any view, in light and dark.
func TestViewsAreAccessible(t *testing.T) {
	address := serve(t, &fakenode.Node{Name: "node-a", Rate: 120}, &fakenode.Node{Name: "node-b", Rate: 20, Healthy: true})
	tab := browser.Open(t, 1280, 860)
	browser.Call(tab, page.SetBypassCSP, page.SetBypassCSPParams{Enabled: true}) // axe-core makes markup
	tab.Do(chromedp.Navigate(address + "/#token=" + token))
	tab.Text("does not answer")
	tab.Run("void (() => {" + browser.Axe(t) + "})()")
	check := func(name string) {
		t.Helper()
		for _, mode := range []string{"light", "dark"} {
			theme(tab, mode)
			got := axe(tab)
			if got.Passes < 10 {
				t.Errorf("%s: axe-core checked only %d rules", name, got.Passes)
			}
			if len(got.Faults) > 0 {
				t.Errorf("%s, %s: %s", name, mode, strings.Join(got.Faults, "\n"))
			}
		}
	}
	for _, v := range views {
		show(tab, v.id)
		tab.Text(v.ready)
		if v.id == "flows" { // rows that change while axe-core looks at them are no fault
			tab.Click("button", "Pause")
		}
		check(v.id)
	}
	tab.Click("button", "Runbook for conntrack-table-full")
	tab.Text("Users see")
	check("runbook")
	show(tab, "services")
	tab.Click(".services [role=row] .name", "catalog")
	tab.Text("The kernel does not hold what is wanted")
	check("service")
	show(tab, "flows")
	filter(tab, "dropped")
	tab.Click(".flows .rows .row", "dropped")
	tab.Text("It was dropped")
	check("flow")
	// The check itself must find faults.
	tab.Run(`void document.querySelector("main").append(Object.assign(document.createElement("img"), {src: "icon.svg"}))`)
	if got := axe(tab); len(got.Faults) == 0 {
		t.Error("a page with a picture without a name was found well")
	}
}

// Each planted fault is on the first page, with the words and the way to its runbook.
func TestFaultsAreShown(t *testing.T) {
	tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Rate: 20}), 1280) // TestLoad is about many
	tab.Text("Endpoint 10.244.2.66:9090 does not answer")
	tab.Click("button", "more")
	for _, want := range []string{
		"packets/s are dropped (snat_ports)", "Connections are refused: 2 packets/s (source_range)",
		"Service payments/ledger", "Service shop/web",
		"The conntrack table of the node is 97 % full", "Table flows is 90 % full",
		"no endpoint is on this node", "connections to Service shop/cart:http fail",
	} {
		tab.Text(want)
	}
	// A finding of status, from the overview to its Service, and in the list of Services.
	tab.Click("button", "Show: Service shop/cart")
	tab.Until("the finding of the Service", `[...document.querySelectorAll(".panel .note")].some(e => e.textContent.includes("connections to Service shop/cart:http fail"))`)
	show(tab, "services")
	tab.Text("endpoint-refuses")
	show(tab, "overview")
	tab.Click("button", "more")
	tab.Click("button", "Runbook: shop/web: ")
	tab.Text("no free port of the node towards the endpoint; a node has some")
	tab.Click("button", "SpillwayFlowTableFull")
	tab.Text("Runbook: SpillwayFlowTableFull")

	// The dead endpoint, from the map to the Service.
	show(tab, "map")
	tab.Until("the map", `[...document.querySelectorAll(".box.endpoint.failing")].some(e => e.textContent.includes("payments/ledger-1"))`)
	tab.Run(`void [...document.querySelectorAll(".box.service")].find(e => e.textContent.includes("payments/ledger")).dispatchEvent(new MouseEvent("click", {bubbles: true}))`)
	tab.Until("the endpoint's state", `[...document.querySelectorAll(".panel tr")].some(r => r.textContent.includes("10.244.2.66") && r.textContent.includes("no answer"))`)

	// A refusal, from the drops to its decision and the runbook.
	show(tab, "drops")
	tab.Text("The client is outside loadBalancerSourceRanges.")
	tab.Until("a refusal", `[...document.querySelectorAll("tr")].some(r => r.textContent.includes("refused") && (r.querySelector("button").click(), true))`)
	tab.Text("198.51.100.7 is in none of 203.0.113.0/24: it may not connect.")
	tab.Click("button", "Open the runbook")
	tab.Text("are configured drops, and raise no alert")
	tab.Click("button", "Close")
	tab.Text("it may not connect")

	// A connection that was not answered, by a filter that the agent applies.
	show(tab, "flows")
	tab.Run(`void (() => { const e = document.querySelector(".filter .address input"); e.value = "10.244.2.66"; e.dispatchEvent(new Event("input", {bubbles: true})); })()`)
	tab.Until("only flows of the endpoint", `[...document.querySelectorAll(".flows .rows .endpoint")].length > 2 && [...document.querySelectorAll(".flows .rows .endpoint")].every(e => e.textContent === "payments/ledger-1")`)
	tab.Click(".flows .rows .row", "no answer")
	tab.Text("4 packets went to 10.244.2.66:9090, and none came back.")
}

// What is wrong with a Service is one entry, the worst first, with all nodes that report it. A refused
// connection is no dropped packet.
func TestFaultsAreByService(t *testing.T) {
	tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Rate: 40}, &fakenode.Node{Name: "node-b", Rate: 40},
		&fakenode.Node{Name: "node-c", Healthy: true}), 1280)
	const groups = `[...document.querySelectorAll(".attention > li")]`
	tab.Until("one entry of the Service with both nodes", groups+`.filter(e => e.innerText.includes("Service shop/cart") && e.innerText.includes("on node-a, node-b")).length === 1`)
	tab.Until("the worst first",
		groups+`.findIndex(e => e.classList.contains("warn")) > `+groups+`.findLastIndex(e => e.classList.contains("bad"))`)
	tab.Until("both numbers", `["connections refused/s", "packets dropped/s"].every(w => [...document.querySelectorAll(".numbers dt")].some(e => e.textContent === w))`)
}

// A page that opens shows the last minute as it was: without a gap, and without a spike of what came at once.
func TestChartsBeginWithoutSpike(t *testing.T) {
	tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Rate: 800, Healthy: true}), 1280)
	show(tab, "services")
	// The points of a line are 0 to 20 high, the highest 2 from the top.
	const heights = `(document.querySelector(".services .rows .spark polyline")?.getAttribute("points") ?? "").split(" ").filter(Boolean).map(p => 19 - Number(p.split(",")[1]))`
	tab.Until("the line of a minute", `(h => h.length === 60 && h[30] > 0 && (window.first ??= h))(`+heights+`)`)
	// The oldest second has begun before the minute. Of six flows a second, three seconds without any are a gap.
	h := browser.Eval[[]float64](tab, "window.first.slice(1)")
	for i := range h[2:] {
		if max(h[i], h[i+1], h[i+2]) <= 0 {
			t.Fatalf("the first line has a gap: %v", h)
		}
	}
	if slices.Sort(h); h[len(h)/2] < 4 {
		t.Errorf("the first line has a spike above all else: %v", h)
	}
}

// Drops have their clients, are searched, and grouped by cause or Service.
func TestDropsAreGrouped(t *testing.T) {
	tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Rate: 100}, &fakenode.Node{Name: "node-b", Rate: 100}), 1280)
	show(tab, "drops")
	const groups = `[...document.querySelectorAll(".drops tbody")]`
	tab.Until("one line of both nodes with its client", groups+`.filter(g => g.innerText.includes("source_range") && g.rows.length === 2 && g.rows[1].innerText.includes("shop/checkout") && g.rows[1].innerText.includes("198.51.100.7") && g.rows[1].innerText.includes("node-a, node-b")).length === 1`)
	tab.Click("button", "By Service")
	tab.Until("the Service with its cause", groups+`.some(g => g.rows[0].innerText === "shop/web" && g.rows[1].innerText.includes("snat_ports"))`)
	tab.Run(`void (() => { const e = document.querySelector("main input"); e.value = "198.51 checkout"; e.dispatchEvent(new Event("input", {bubbles: true})); })()`)
	tab.Until("one group", groups+`.length === 1 && `+groups+`[0].innerText.includes("shop/checkout") && [...document.querySelectorAll("main .scroll:last-of-type tbody tr")].every(r => r.innerText.includes("checkout") || r.innerText.includes("source_range"))`)
}

// On a phone, the filters of flows are folded, and a row fits.
func TestFiltersFold(t *testing.T) {
	tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Rate: 100}), 390)
	show(tab, "flows")
	tab.Text("the newest first")
	const seen = `[...document.querySelectorAll(".filter, .kinds")].filter(e => e.offsetHeight > 0).length`
	tab.Until("folded filters", seen+` === 0`)
	tab.Click("button", "Filter")
	tab.Until("filters", seen+` === 2`)
	for _, view := range []string{"flows", "services"} {
		show(tab, view)
		tab.Until(view+" as wide as the window", `(e => e && e.scrollWidth <= e.clientWidth)(document.querySelector(".table"))`)
	}
}

// The map fits the window of a phone and of a laptop, and begins with what fails.
func TestMapFits(t *testing.T) {
	address := serve(t, &fakenode.Node{Name: "node-a", Rate: 200})
	for _, width := range []int{390, 1280} {
		tab := open(t, address, width)
		show(tab, "map")
		tab.Until("a failing Service first", `(all => all.length > 5 && all[0].classList.contains("failing"))([...document.querySelectorAll(".box.service")].sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top))`)
		tab.Until("red ways", `document.querySelectorAll(".way.bad").length > 2`)
		tab.Until(fmt.Sprintf("a map that fits %d px", width), `(m => m.scrollWidth <= m.clientWidth)(document.querySelector(".map"))`)
	}
}

// The health of each Service, the choice of those with findings, and an order by the numbers that are shown.
func TestServicesShowHealth(t *testing.T) {
	tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Services: 40, Rate: 200}), 1280)
	show(tab, "services")
	const rows = `[...document.querySelectorAll(".services .rows .row")]`
	cell := func(service, column, want string) {
		t.Helper()
		tab.Until(service+": "+want, fmt.Sprintf(`%s.some(r => r.querySelector(".name").textContent === %q && r.querySelector(%q).textContent.includes(%q))`,
			rows, service, "."+column, want))
	}
	cell("shop/cart", "health", "endpoint-refuses")
	cell("edge/ingress", "health", "problem")
	cell("payments/api", "health", "ok")
	cell("shop/cart", "endpoints .bad", "1 of 4 fail")
	cell("payments/ledger", "endpoints .bad", "1 of 3 fail")
	tab.Until("numbers in order", `(n => n.length > 5 && n.every((x, i) => i === 0 || x <= n[i - 1]))(`+rows+`.map(r => r.querySelector(".rate").textContent).filter(x => x !== "–").map(Number))`)
	tab.Click("button", "With findings only")
	tab.Text("of 40 Services")
	tab.Until("only Services with faults", rows+`.length >= 3 && `+rows+`.every(r => r.querySelector(".health").textContent !== "ok" || r.querySelector(".endpoints .bad"))`)

	// The panel agrees with the flows: half of the connections to one endpoint are reset.
	tab.Click(".services [role=row] .name", "cart")
	tab.Until("the failures", `/Failed in the last minute: \d+ reset by the endpoint/.test(document.querySelector(".panel")?.innerText)`)
	tab.Until("the endpoint", `[...document.querySelectorAll(".panel tr")].some(r => r.textContent.includes("10.244.1.67") && r.querySelector(".chip.bad")?.textContent === "refuses")`)
	tab.Click("button", "Show its flows")
	tab.Until("its resets", `[...document.querySelectorAll(".flows .rows .kind")].some(e => e.textContent === "reset")`)

	// What is not counted is not 0.
	show(tab, "services")
	tab.Click(".services [role=row] .name", "queue")
	tab.Until("no bytes", `document.querySelector(".panel")?.innerText.includes("not known Packets of sockets' own connections are not counted.")`)
}

// A handshake of 90 µs is the same in the list and in the panel: neither 0.00 ms nor the 0.5 ms of a bucket.
func TestHandshakes(t *testing.T) {
	tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Rate: 200, Healthy: true, Handshake: 90 * time.Microsecond}), 1280)
	show(tab, "services")
	tab.Until("the list's handshake", `[...document.querySelectorAll(".services .rows .row")].some(r => r.textContent.includes("catalog") && r.querySelector(".handshake").textContent === "92 µs")`)
	tab.Click(".services [role=row] .name", "catalog")
	tab.Until("the panel's handshake", `document.querySelector(".panel")?.textContent.includes("median 92 µs")`)
}

// Names in flows are no markup and drive no terminal.
func TestHostileNames(t *testing.T) {
	tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Rate: 100, Hostile: true}), 1280)
	tab.Text("does not answer")
	for _, view := range []string{"flows", "map", "drops", "overview"} {
		show(tab, view)
		if view != "overview" {
			tab.Text(`\u001b[31m`)
		}
	}
	show(tab, "flows")
	filter(tab, "dropped")
	tab.Click(".flows .rows .row", "<img")
	tab.Text("The decision")
	tab.Text("It was dropped")
	tab.Click("button", "Show the Service")
	tab.Text("The Service cannot be read")
	if got := browser.Eval[string](tab, `document.title + [...document.images].map(i => i.getAttribute("src"))`); got != "Flows – Spillwayicon.svg" {
		t.Errorf("title and pictures: %s", got)
	}
	if raw := browser.Eval[bool](tab, `document.body.textContent.includes("\x1b")`); raw {
		t.Error("the page has an escape character")
	}
}

// The page works without a mouse.
func TestKeys(t *testing.T) {
	tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Rate: 100}), 1280)
	tab.Text("Needs attention")
	key := func(keys string) { tab.Do(chromedp.KeyEvent(keys)) }
	key("2")
	tab.Text("checkout")
	// As a keyboard does: the driver would type a character that the page has handled.
	tab.Run(`void document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "/", bubbles: true}))`)
	key("shop")
	tab.Text("4 of 11 Services")
	tab.Run(`void document.querySelector(".services").focus()`)
	key(kb.ArrowDown + kb.ArrowDown + kb.End + kb.Home)
	tab.Until("the first row", `document.querySelector(".row.active")?.getAttribute("aria-rowindex") === "2" && document.querySelector(".services").getAttribute("aria-activedescendant") === document.querySelector(".row.active").id`)
	key(kb.Enter)
	tab.Until("the panel", `document.activeElement.textContent.startsWith("shop/")`)
	key(kb.Escape)
	tab.Until("the table again", `!document.querySelector(".panel") && document.activeElement.classList.contains("services")`)
	key("4")
	tab.Text("the newest first")
	key("p")
	tab.Text("Paused.")
	key("p")
	tab.Text("the newest first")
	key("?")
	tab.Until("the keys", `document.querySelector("dialog").open`)
	key(kb.Escape)
	tab.Until("no keys", `!document.querySelector("dialog").open`)
}

// What the page says where there is nothing to show.
func TestWhereNothingAnswers(t *testing.T) {
	t.Run("no agent", func(t *testing.T) {
		tab := open(t, serve(t, nil), 1280)
		tab.Text("No agent answers")
		tab.Text("Start it, or name its socket with --api-socket.")
	})
	t.Run("no key", func(t *testing.T) {
		tab := browser.Open(t, 1280, 860)
		tab.Do(chromedp.Navigate(serve(t, &fakenode.Node{Name: "node-a"}) + "/"))
		tab.Text("Open the address that spillway ui printed.")
	})
	t.Run("an older agent", func(t *testing.T) {
		tab := open(t, serve(t, &fakenode.Node{Name: "node-a", NoWatch: true}), 1280)
		show(tab, "flows")
		tab.Text("This agent has no live events")
		tab.Click("button", "Open now")
		tab.Text("and more: use a filter")
		show(tab, "services")
		tab.Text("checkout")
		show(tab, "map")
		tab.Text("There are no events to draw")
	})
	t.Run("a quiet and healthy node", func(t *testing.T) {
		tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Healthy: true}), 1280)
		tab.Text("Nothing is known to be wrong.")
		for view, want := range map[string]string{"flows": "No event yet", "map": "No traffic yet", "drops": "No packet was dropped",
			"findings": "No finding"} {
			show(tab, view)
			tab.Text(want)
		}
	})
	t.Run("nodes that report no flows", func(t *testing.T) {
		for mode, want := range map[string][3]string{
			"refused":   {"not known", "The traffic is not known", "Give it --flow-events on-demand"},
			"on-demand": {"turning on", "Turning on events of flows", "Turning on events of flows"},
		} {
			tab := open(t, serve(t, &fakenode.Node{Name: "node-a", Healthy: true, Mode: mode}), 1280)
			tab.Text(want[0])
			show(tab, "map")
			tab.Text(want[1])
			show(tab, "flows")
			tab.Text(want[2])
		}
	})
	t.Run("one of three nodes hangs, one is gone", func(t *testing.T) {
		hangs := filepath.Join(t.TempDir(), "hangs.sock")
		defer listen(t, hangs).Close() // which accepts nothing
		tab := open(t, serveSockets(t, []string{hangs, filepath.Join(t.TempDir(), "none.sock")}, &fakenode.Node{Name: "node-a", Rate: 50}), 1280)
		tab.Text("Endpoint 10.244.2.66:9090 does not answer")
		tab.Text("The agent accepts calls but does not answer in time.")
		tab.Text("2 of 3 do not answer")
		show(tab, "services")
		tab.Text("checkout")
	})
	t.Run("the program ends", func(t *testing.T) {
		address, end := serveUntil(t, nil, &fakenode.Node{Name: "node-a", Rate: 50})
		tab := open(t, address, 1280)
		tab.Text("Needs attention")
		end()
		tab.Text("The program spillway ui has ended.")
		tab.Text("What you see is old.")
	})
}

// frames counts how many frames a change needs to be seen.
const frames = `async function frames(act, seen) {
	act();
	for (let n = 1; n < 1000; n++) {
		await new Promise(requestAnimationFrame);
		if (seen()) return n;
	}
	return 1000;
}`

// With 5,000 Services and 2,000 events in a second, the page answers each key within a few
// frames, and its size stays bounded. How many frames it draws depends on the machine.
func TestLoad(t *testing.T) {
	busy := &fakenode.Node{Name: "node-a", Services: 5000, Rate: 2000}
	loaded := open(t, serve(t, busy), 1280)
	loaded.Text("Needs attention")
	show(loaded, "flows")
	loaded.Text("5,000 events")

	answers := func(what, act, seen string) {
		t.Helper()
		var most int
		for range 20 {
			most = max(most, browser.Eval[int](loaded, fmt.Sprintf(`(() => { %s; return frames(() => { %s }, () => %s) })()`, frames, act, seen)))
		}
		t.Logf("%s: %d frames at most", what, most)
		if most > 6 {
			t.Errorf("%s needs %d frames, want 6 at most", what, most)
		}
	}
	answers("a click on Pause", `window.before = document.querySelector(".pause").textContent; document.querySelector(".pause").click()`,
		`document.querySelector(".pause").textContent !== window.before`)
	const press = `document.querySelector(".table").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown", bubbles: true}))`
	const row = `document.querySelector(".row.active")?.getAttribute("aria-rowindex")`
	answers("a key in the flows", `window.before = `+row+`; `+press, row+` !== window.before`)

	// A key in a list that runs pauses it as it was drawn: the row it goes to is seen.
	for range 10 {
		n := browser.Eval[int](loaded, fmt.Sprintf(`(async () => { %s
			const pause = document.querySelector(".pause");
			if (pause.textContent === "Resume") pause.click();
			await new Promise(done => setTimeout(done, 300));
			window.before = %s;
			return frames(() => { %s }, () => %[2]s !== window.before) })()`, frames, row, press))
		if n > 6 {
			t.Errorf("a key in the running flows needs %d frames, want 6 at most", n)
		}
	}

	// While the list is paused, all events are counted.
	newer := func() int {
		var n int
		text := strings.ReplaceAll(browser.Eval[string](loaded,
			`document.querySelector(".bar-of-list").innerText.match(/Paused. ([0-9,]+) newer/)[1]`), ",", "")
		if _, err := fmt.Sscan(text, &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	const newerThan = `Number(document.querySelector(".bar-of-list").innerText.match(/Paused. ([0-9,]+) newer/)[1].replaceAll(",", "")) > %d`
	count, sent := newer(), busy.Sent()
	loaded.Until("more events", fmt.Sprintf(newerThan, count+8000))
	// A page that is late takes the rest now, and one that has lost some never has all.
	busy.Quiet(true)
	loaded.Until("all events", fmt.Sprintf(newerThan, count+int(busy.Sent()-sent)-1))
	busy.Quiet(false)

	show(loaded, "services")
	loaded.Text("5,000 Services")
	// The Services are sorted by their rates, so another one may get the place of the one before.
	const name = `document.querySelector(".row.active .name")?.textContent`
	answers("a key in the Services", `window.before = `+name+`; `+press, name+` !== window.before`)
	loaded.Run(`window.search = text => { const e = document.querySelector("main input"); e.value = text; e.dispatchEvent(new Event("input", {bubbles: true})); }`)
	answers("a search", `window.n = (window.n ?? 0) + 1; window.search("service-00" + (10 + window.n))`,
		`document.querySelector(".rows .row")?.textContent.includes("service-00" + (10 + window.n))`)
	loaded.Run(`window.search("")`)
	for _, v := range views {
		show(loaded, v.id)
		loaded.Text(v.ready)
		if n := browser.Eval[int](loaded, `document.querySelectorAll("*").length`); n > 3000 {
			t.Errorf("%s has %d elements, want 3000 at most", v.id, n)
		}
	}
}

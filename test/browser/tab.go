package browser

import (
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/chromedp"

	"spillway.dev/spillway/test/await"
)

// Tab is a tab of a chromium of its own, which a test drives.
type Tab struct {
	t   *testing.T
	ctx context.Context

	mu     sync.Mutex
	errors []string
}

// patience limits a step in a page. A step takes well below a second.
const patience = await.Limit

// Open starts Debian's chromium with one tab of a size in CSS pixels. It ends with the test.
func Open(t *testing.T, width, height int) *Tab {
	t.Helper()
	program, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatalf("find a browser: %v: run \"hack/deps browser\"", err)
	}
	const tries = 3 // chromium has hung when it attached to its tab, on a busy machine
	for try := 1; ; try++ {
		tab, err := start(t, program, width, height)
		if err == nil {
			go tab.listen(chromedp.Console(tab.ctx))
			return tab
		}
		if t.Logf("start chromium, try %d: %v", try, err); try == tries {
			t.FailNow()
		}
	}
}

// start starts chromium. Without an answer within patience it ends it, and returns an error.
func start(t *testing.T, program string, width, height int) (*Tab, error) {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(program), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.WindowSize(width, height),
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.WSURLReadTimeout(patience))
	allocator, end := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(end)
	ctx, endTab := chromedp.NewContext(allocator, chromedp.WithErrorf(func(string, ...any) {}))
	t.Cleanup(endTab)
	// The first call starts the browser, which ends with that call's context: it has no limit.
	started := make(chan error, 1)
	go func() { started <- chromedp.Do(ctx, chromedp.EmulateViewport(int64(width), int64(height))) }()
	select {
	case err := <-started:
		return &Tab{t: t, ctx: ctx}, err
	case <-time.After(patience):
		end()
		return nil, errors.New("no answer")
	}
}

// listen keeps errors of scripts and breaches of a page's policies. An answer that is an
// error is the page's business.
func (tab *Tab) listen(messages func(func(chromedp.ConsoleMessage, error) bool)) {
	for m, err := range messages {
		if err != nil {
			return
		}
		if m.IsException() || m.Type == "error" && m.Source != "network" {
			tab.mu.Lock()
			tab.errors = append(tab.errors, m.String())
			tab.mu.Unlock()
		}
	}
}

// Errors returns the errors of scripts, and breaches of a page's policies, so far.
func (tab *Tab) Errors() []string {
	tab.mu.Lock()
	defer tab.mu.Unlock()
	return tab.errors
}

// Do carries out actions. The test fails if they take too long.
func (tab *Tab) Do(actions ...chromedp.Action[chromedp.Void]) {
	tab.t.Helper()
	ctx, cancel := context.WithTimeout(tab.ctx, patience)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		tab.t.Fatalf("drive chromium: %v", err)
	}
}

// Call calls a command of the browser's protocol in a tab.
func Call[P, R any](tab *Tab, command cdp.Command[P, R], params P) R {
	tab.t.Helper()
	ctx, cancel := context.WithTimeout(tab.ctx, patience)
	defer cancel()
	result, err := chromedp.Call(ctx, command, params)
	if err != nil {
		tab.t.Fatalf("call chromium: %v", err)
	}
	return result
}

// Eval evaluates an expression in a tab. A promise is awaited.
func Eval[T any](tab *Tab, expression string) T {
	tab.t.Helper()
	ctx, cancel := context.WithTimeout(tab.ctx, patience)
	defer cancel()
	result, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		tab.t.Fatalf("evaluate %.200s: %v: %s", expression, err, tab.state())
	}
	return result
}

// Run evaluates an expression in the page for its effect.
func (tab *Tab) Run(expression string) {
	tab.t.Helper()
	Eval[chromedp.Void](tab, expression)
}

// Until waits until an expression in the page is true.
func (tab *Tab) Until(what, expression string) {
	tab.t.Helper()
	if err := await.Error(func() error {
		if !Eval[bool](tab, "!!("+expression+")") {
			return errors.New(what)
		}
		return nil
	}); err != nil {
		tab.t.Fatalf("the page shows:\n%s\nerrors: %q; %s\n%v", Eval[string](tab, "document.body.innerText.slice(0, 20000)"), tab.Errors(), tab.state(), err)
	}
}

// state says whether the page runs and draws: a test may fail because the browser hangs.
func (tab *Tab) state() string {
	ctx, cancel := context.WithTimeout(tab.ctx, 20*time.Second)
	defer cancel()
	got, err := chromedp.Run(ctx, chromedp.Evaluate[string](`Promise.race([
		new Promise(done => requestAnimationFrame(() => done("the page draws"))),
		new Promise(done => setTimeout(() => done("the page draws no frame in 10 s"), 10_000))]).then(s => s + ", it is " + document.visibilityState)`, chromedp.EvalAwaitPromise))
	if err != nil {
		return "the page does not run: " + err.Error()
	}
	return got
}

// Text waits until the page shows a text.
func (tab *Tab) Text(text string) {
	tab.t.Helper()
	tab.Until("wait for "+text, "document.body.innerText.includes("+quote(text)+")")
}

// Click clicks the first element of a selector that has a text or a label, once it exists.
func (tab *Tab) Click(selector, text string) {
	tab.t.Helper()
	tab.Until("wait for "+selector+" "+text, "[...document.querySelectorAll("+quote(selector)+")].some(e => "+
		"(e.getAttribute('aria-label') + e.textContent).includes("+quote(text)+") && (e.click(), true))")
}

// Screenshot returns the picture of the tab, as PNG.
func (tab *Tab) Screenshot() []byte {
	tab.t.Helper()
	ctx, cancel := context.WithTimeout(tab.ctx, patience)
	defer cancel()
	png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	if err != nil {
		tab.t.Fatalf("take a picture: %v", err)
	}
	return png
}

func quote(s string) string {
	text, err := json.Marshal(s)
	if err != nil {
		panic(err) // a string has no error
	}
	return string(text)
}

package browser

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/page"
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

// askAgain is when a question without an answer is asked again: chromium has lost answers.
const askAgain = 30 * time.Second

// patience limits a step in a page. A step takes well below a second.
const patience = await.Limit

// startPatience limits a start, which takes about a second and is tried again.
const startPatience = 30 * time.Second

// framesForSure calls an animation frame's function after a second without a frame: at times, on
// a busy machine, chromium without a window runs a page and never draws it again.
const framesForSure = `(() => {
	const request = window.requestAnimationFrame.bind(window), cancel = window.cancelAnimationFrame.bind(window), timers = new Map();
	window.requestAnimationFrame = run => {
		const once = time => {
			if (timers.delete(frame)) { clearTimeout(timer); cancel(frame); run(time); }
		};
		const late = () => { window.missedFrames = (window.missedFrames ?? 0) + 1; once(performance.now()); };
		const frame = request(once), timer = setTimeout(late, 1000);
		timers.set(frame, timer);
		return frame;
	};
	window.cancelAnimationFrame = frame => { clearTimeout(timers.get(frame)); timers.delete(frame); cancel(frame); };
})()`

// Open starts Debian's chromium with one tab of a size in CSS pixels. It ends with the test.
func Open(t *testing.T, width, height int) *Tab {
	t.Helper()
	program := find(t)
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
	go func() {
		err := chromedp.Do(ctx, chromedp.EmulateViewport(int64(width), int64(height)))
		if err == nil {
			_, err = chromedp.Call(ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: framesForSure})
		}
		started <- err
	}()
	select {
	case err := <-started:
		return &Tab{t: t, ctx: ctx}, err
	case <-time.After(startPatience):
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
	result, err := evaluate[T](tab, expression, patience)
	if err != nil {
		tab.t.Fatalf("evaluate %.200s: %v: %s", expression, err, tab.state())
	}
	return result
}

func evaluate[T any](tab *Tab, expression string, limit time.Duration) (T, error) {
	ctx, cancel := context.WithTimeout(tab.ctx, limit)
	defer cancel()
	return chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
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
		is, err := evaluate[bool](tab, "!!("+expression+")", askAgain)
		if err == nil && !is {
			err = errors.New(what)
		}
		return err
	}); err != nil {
		tab.t.Fatalf("the page shows:\n%s\nerrors: %q; %s\n%v", Eval[string](tab, "document.body.innerText.slice(0, 20000)"),
			tab.Errors(), tab.state(), err)
	}
}

// state says whether the page runs and draws: a test may fail because the browser hangs.
func (tab *Tab) state() string {
	missed, err := evaluate[int](tab, "window.missedFrames ?? 0", askAgain)
	if err != nil {
		return "the page does not run: " + err.Error()
	}
	return fmt.Sprintf("%d frames were not drawn within a second", missed)
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
func (tab *Tab) Screenshot() (png []byte) {
	tab.t.Helper()
	if err := await.Error(func() (err error) {
		ctx, cancel := context.WithTimeout(tab.ctx, askAgain)
		defer cancel()
		png, err = chromedp.Run(ctx, chromedp.CaptureScreenshot())
		return err
	}); err != nil {
		tab.t.Fatalf("take a picture: %v: %s", err, tab.state())
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

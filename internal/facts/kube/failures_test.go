package kube

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

// badServer answers requests as bad says, until good is closed. Then it has no objects.
type badServer struct {
	bad  func(n int, w http.ResponseWriter, r *http.Request)
	good chan struct{}

	mu       sync.Mutex
	requests map[string]int // by resource
	most     int            // requests of Services until enough; 0: not known yet
	enough   chan struct{}  // closed at most
}

// often is more than the attempts that client-go makes before a request fails.
const often = 12

func (s *badServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case <-s.good:
		answerRight(w, r)
		return
	default:
	}
	resource := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	s.mu.Lock()
	s.requests[resource]++
	n := s.requests[resource]
	if resource == "services" && n == s.most {
		close(s.enough)
	}
	s.mu.Unlock()
	w.Header().Add("Warning", `299 - "this server has a proxy"`)
	s.bad(n, w, r)
}

// answerRight answers as a server without WatchList and without objects. Its watches stay open.
func answerRight(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if r.URL.Query().Get("sendInitialEvents") != "" {
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
		return
	}
	if r.URL.Query().Get("watch") != "" {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		return
	}
	kinds := map[string]string{"services": "ServiceList", "nodes": "NodeList"}
	version, kind := "v1", kinds[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]
	if kind == "" {
		version, kind = "discovery.k8s.io/v1", "EndpointSliceList"
	}
	items := ""
	if kind == "NodeList" {
		items = `{"metadata":{"name":"a"}}`
	}
	fmt.Fprintf(w, `{"kind":%q,"apiVersion":%q,"metadata":{"resourceVersion":"7"},"items":[%s]}`, kind, version, items)
}

func forbid(_ int, w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusForbidden)
	fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`)
}

func html(_ int, w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html")
	fmt.Fprintf(w, "<html>Log in: %d</html>", time.Now().UnixNano())
}

func disguised(n int, w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, "<html>%d: %s</html>", n, r.URL)
}

func hangUp(int, http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// logText is a log that several goroutines write.
type logText struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements io.Writer.
func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// TestALastingFaultOfTheServerIsOneProblem has servers and proxies that are wrong in each
// request. The problem stays until the server is right, at few places, and client-go logs
// nothing beside it.
func TestALastingFaultOfTheServerIsOneProblem(t *testing.T) {
	before := backoff
	backoff = wait.Backoff{Duration: time.Millisecond, Cap: 2 * time.Millisecond, Steps: 1000, Factor: 2}
	t.Cleanup(func() { backoff = before })
	log := &logText{}
	LogClients(slog.New(slog.NewTextHandler(log, nil)))
	t.Cleanup(klog.ClearLogger)
	watches := func(r *http.Request) bool { return r.URL.Query().Get("watch") != "" }
	for name, c := range map[string]struct {
		bad    func(int, http.ResponseWriter, *http.Request)
		places int // of problems: one of the server, and one of each of three resources
	}{
		"forbids":              {forbid, 3},
		"answers HTML":         {html, 1},
		"answers HTML as JSON": {disguised, 1},
		"closes":               {hangUp, 1},
		"forbids to watch, hangs up on lists": {func(n int, w http.ResponseWriter, r *http.Request) {
			if watches(r) {
				forbid(n, w, r)
			} else {
				hangUp(n, w, r)
			}
		}, 4},
		"forbids to watch": {func(n int, w http.ResponseWriter, r *http.Request) {
			if watches(r) {
				forbid(n, w, r)
			} else {
				answerRight(w, r)
			}
		}, 3},
		"closes for Services": {func(n int, w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/services") {
				hangUp(n, w, r)
			} else {
				answerRight(w, r)
			}
		}, 1},
		"alternates": {func(n int, w http.ResponseWriter, r *http.Request) {
			switch n % 4 {
			case 0:
				forbid(n, w, r)
			case 1:
				html(n, w, r)
			case 2:
				w.WriteHeader(http.StatusBadGateway)
			case 3:
				hangUp(n, w, r)
			}
		}, 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testLastingFault(t, log, c.bad, c.places, name != "alternates")
		})
	}
}

func testLastingFault(t *testing.T, log *logText, bad func(int, http.ResponseWriter, *http.Request), most int, stable bool) {
	s := &badServer{bad: bad, good: make(chan struct{}), requests: map[string]int{}, enough: make(chan struct{})}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	t.Cleanup(server.CloseClientConnections)
	client, where, err := Connect(Access{Master: server.URL, QPS: 1e6, Burst: 1e6})
	if err != nil {
		t.Fatal(err)
	}
	source, err := New(Config{Client: client, Server: where, NodeName: "a", Logger: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan []model.Problem, 100_000)
	running := t.Context()
	ended := make(chan error, 1)
	go func() {
		ended <- source.Run(running, func(_ model.Delta, ps []model.Problem) {
			if ps != nil {
				told <- ps
			}
		})
	}()
	t.Cleanup(func() { <-ended })
	var first []model.Problem
	await.True(t, "a problem of a server that is wrong", func() bool {
		select {
		case first = <-told:
		default:
		}
		return len(first) > 0
	})
	s.mu.Lock()
	s.most = s.requests["services"] + often
	s.mu.Unlock()
	select {
	case <-s.enough:
	case <-time.After(await.Limit):
		t.Fatal("few requests")
	}
	places := map[string]bool{}
	for ps, n := first, len(told); ; ps, n = <-told, n-1 {
		if len(ps) == 0 {
			t.Fatal("resolved while the server is wrong")
		}
		at := map[string]bool{}
		for _, p := range ps {
			key := p.Where + " " + p.Field
			if at[key] {
				t.Errorf("two problems of one place: %v", ps)
			}
			at[key], places[key] = true, true
		}
		if stable && len(at) < len(places) {
			t.Fatalf("one of %v is resolved while the server is wrong: %v", places, ps)
		}
		if n == 0 {
			break
		}
	}
	if len(places) == 0 || len(places) > most {
		t.Errorf("problems at %v, want 1 to %d places", places, most)
	}
	close(s.good)
	await.True(t, "no problem of a server that is right", func() bool {
		select {
		case ps := <-told:
			return len(ps) == 0
		default:
			return false
		}
	})
	if text := log.String(); text != "" {
		t.Errorf("the log beside the problems:\n%s", text)
	}
}

// TestClientGoLogsAtLevelDebug has lines that client-go logs without a context.
func TestClientGoLogsAtLevelDebug(t *testing.T) {
	log := &logText{}
	LogClients(slog.New(slog.NewTextHandler(log, nil)))
	t.Cleanup(klog.ClearLogger)
	klog.Warning("a")
	klog.ErrorS(nil, "b")
	if text := log.String(); text != "" {
		t.Errorf("log:\n%s", text)
	}
	LogClients(slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	klog.Warning("a")
	if text := log.String(); !strings.Contains(text, "level=DEBUG") {
		t.Errorf("log of level debug: %q", text)
	}
}

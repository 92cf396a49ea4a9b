package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

// following runs a Source against a server. It returns the problems that the Source
// delivers, and its ServerMonitor, which has a short timeout.
func following(t *testing.T, server string) (chan []model.Problem, *ServerMonitor) {
	t.Helper()
	monitor := NewServerMonitor()
	monitor.quiet, monitor.timeout = 200*time.Millisecond, 300*time.Millisecond
	client, name, err := Connect(Access{Master: server, Monitor: monitor, QPS: 1e6, Burst: 1e6})
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Config{Client: client, Server: name, NodeName: "a", Monitor: monitor, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan []model.Problem, 1000)
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		ended <- s.Run(ctx, func(_ model.Delta, ps []model.Problem) {
			if ps != nil {
				told <- ps
			}
		})
	}()
	t.Cleanup(func() { end(); <-ended })
	return told, monitor
}

// awaitProblem waits for a problem that contains a text, or, for "", for no problem.
func awaitProblem(t *testing.T, told chan []model.Problem, text string, want bool) {
	t.Helper()
	limit := time.After(await.Limit)
	for {
		select {
		case ps := <-told:
			found := false
			for _, p := range ps {
				found = found || strings.HasPrefix(p.Where, "API server 127.0.0.1:") && strings.Contains(p.What, text)
			}
			if found == want {
				return
			}
		case <-limit:
			t.Fatalf("%q among the problems: never %v", text, want)
		}
	}
}

const noAnswer, closes = "does not answer in time; check ", "closes connections; check "

func reachable(c *ServerMonitor) float64 {
	var m dto.Metric
	if err := c.Collectors()[0].(prometheus.Metric).Write(&m); err != nil {
		return -1
	}
	return m.GetGauge().GetValue()
}

// TestAServerThatIsSilentIsAProblem has a server that accepts connections and sends
// nothing, and servers that close them, before a request or after it. client-go reports
// none as an error of a watch, and the errors of lists differ.
func TestAServerThatIsSilentIsAProblem(t *testing.T) {
	hang := func(c net.Conn) {
		<-t.Context().Done() // a connection that nothing refers to is closed
		c.Close()
	}
	reset := func(c net.Conn) {
		_ = c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	end := func(c net.Conn) {
		_, _ = c.Read(make([]byte, 10_000))
		c.Close()
	}
	for name, c := range map[string]struct {
		take [2]func(net.Conn)
		want string
	}{
		"hangs":      {[2]func(net.Conn){hang, hang}, noAnswer},
		"closes":     {[2]func(net.Conn){end, end}, closes},
		"resets":     {[2]func(net.Conn){reset, reset}, closes},
		"alternates": {[2]func(net.Conn){end, reset}, closes},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			var connections atomic.Int64
			go func() {
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					go c.take[connections.Add(1)%2](conn)
				}
			}()
			told, monitor := following(t, "http://"+l.Addr().String())
			awaitProblem(t, told, c.want, true)
			if reachable(monitor) != 0 {
				t.Error("the metric says that it is reachable")
			}
			if c.want == noAnswer {
				return
			}
			enough := connections.Load() + 5*often
			await.True(t, "more connections", func() bool { return connections.Load() >= enough })
			if len(told) > 0 {
				t.Errorf("a server that stays silent has another problem: %v", <-told)
			}
		})
	}
}

// TestASilentServerHasOneProblem has the errors of requests that a server closes, in each
// state of the connection, and any errors while the server is silent.
func TestASilentServerHasOneProblem(t *testing.T) {
	s := &Source{cfg: Config{Server: "x", Monitor: NewServerMonitor()}}
	for _, err := range []error{
		io.EOF, io.ErrUnexpectedEOF, errClosed, syscall.ECONNRESET, syscall.EPIPE, net.ErrClosed,
		&url.Error{Op: "Get", URL: "http://x", Err: io.EOF},
		&url.Error{Op: "Get", URL: "http://x", Err: errors.New("http: server closed idle connection")},
		fmt.Errorf("%w - error from a previous attempt: EOF", &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}),
	} {
		if p, is := s.serverProblem(err); !is || !strings.HasPrefix(p.What, closes) {
			t.Errorf("%v: problem %q, want that it %s", err, p.What, closes)
		}
	}
	s.cfg.Monitor.away = "is silent"
	for _, err := range []error{nil, io.EOF, syscall.ECONNREFUSED, apierrors.NewUnauthorized(""), errors.New("x")} {
		if p, is := s.serverProblem(err); !is || p.What != "is silent" {
			t.Errorf("%v of a server that is silent: problem %q", err, p.What)
		}
	}
}

// TestAServerThatFallsSilentIsAProblemUntilItIsBack has a server that refuses requests
// after its return. A refusal is an answer.
func TestAServerThatFallsSilentIsAProblemUntilItIsBack(t *testing.T) {
	var silent atomic.Bool
	free := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if silent.Load() {
			select {
			case <-free:
			case <-r.Context().Done():
			}
		}
		w.WriteHeader(http.StatusForbidden)
	}))
	t.Cleanup(server.Close)
	told, monitor := following(t, server.URL)
	select {
	case <-told: // that it forbids, so it answers
	case <-time.After(await.Limit):
		t.Fatal("nothing is forbidden")
	}
	if got := reachable(monitor); got != 1 {
		t.Errorf("one that answers: reachable %v", got)
	}
	silent.Store(true)
	awaitProblem(t, told, noAnswer, true)
	if got := reachable(monitor); got != 0 {
		t.Errorf("one that is silent: reachable %v", got)
	}
	silent.Store(false)
	close(free)
	awaitProblem(t, told, noAnswer, false)
}

// TestAServerWithoutWatchListIsNoProblem has an older server, which refuses to begin a
// watch with a list. A refusal of any other watch is a problem.
func TestAServerWithoutWatchListIsNoProblem(t *testing.T) {
	s := newSource(t, Config{Server: "x"})
	s.deliver = func(model.Delta, []model.Problem) {}
	k := s.kinds[0].(*kindStore[*corev1.Service, model.Service])
	k.lw = &cache.ListWatch{
		ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) { return nil, nil },
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) {
			return nil, apierrors.NewInvalid(policySample().GroupVersionKind().GroupKind(), "", nil)
		},
	}
	watches := cache.ToListerWatcherWithContext(s.observe(k))
	for _, c := range []struct {
		initial  *bool
		problems int
	}{{new(bool), 0}, {nil, 1}} {
		_, err := watches.WatchWithContext(t.Context(), metav1.ListOptions{SendInitialEvents: c.initial})
		if !apierrors.IsInvalid(err) || len(s.serverProblems()) != c.problems {
			t.Errorf("%v: error %v, problems %v, want %d", c, err, s.serverProblems(), c.problems)
		}
	}
}

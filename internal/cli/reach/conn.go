package reach

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream"
)

// greeting is the first line of api-pipe, once it is connected to the agent's API.
const greeting = "spillway-api 1\n"

// executor returns what runs a command in an agent's Pod.
func (c *Cluster) executor(a Agent, command []string) (remotecommand.Executor, error) {
	request := c.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(a.Namespace).Name(a.Pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{
			Container: container, Command: command, Stdin: true, Stdout: true, Stderr: true,
		}, scheme.ParameterCodec)
	spdy, err := remotecommand.NewSPDYExecutor(c.cfg.REST, http.MethodPost, request.URL())
	if err != nil {
		return nil, err
	}
	ws, err := remotecommand.NewWebSocketExecutor(c.cfg.REST, http.MethodGet, request.URL().String())
	if err != nil {
		return nil, err
	}
	return &executor{ws: ws, spdy: spdy}, nil
}

// executor executes over WebSocket, or over SPDY where a proxy or the API server refuses
// WebSocket. kubectl does the same. But the errors of SPDY are plain text, so what the API
// server said first is kept: its Status names the right that is missing.
type executor struct {
	remotecommand.Executor // nil: only the next method is called
	ws, spdy               remotecommand.Executor
}

func (e *executor) StreamWithContext(ctx context.Context, o remotecommand.StreamOptions) error {
	err := e.ws.StreamWithContext(ctx, o)
	var refused *httpstream.UpgradeFailureError
	if !errors.As(err, &refused) && !httpstream.IsHTTPSProxyError(err) {
		return err
	}
	again := e.spdy.StreamWithContext(ctx, o)
	var exit exec.CodeExitError
	var status *apierrors.StatusError
	if again != nil && !errors.As(again, &exit) && refused != nil && errors.As(refused.Cause, &status) {
		return status
	}
	return again
}

// conn is the connection of an exec's streams. Its deadlines are those of net.Pipe.
type conn struct {
	agent   Agent
	in, out net.Conn // the near ends of the exec's stdin and stdout
	stderr  tail
	end     context.CancelFunc
	done    chan struct{} // closed when the exec has ended
	err     error         // of the exec; after done
}

// quietly returns a context in which client-go logs nothing: it logs the end of a connection as
// errors, on stderr.
func quietly(ctx context.Context) context.Context { return klog.NewContext(ctx, logr.Discard()) }

// open starts an exec and waits for the greeting. ctx bounds that, not the connection.
func open(ctx context.Context, e remotecommand.Executor, a Agent) (net.Conn, error) {
	life, end := context.WithCancel(quietly(context.Background()))
	nearIn, stdin := net.Pipe()
	nearOut, stdout := net.Pipe()
	c := &conn{agent: a, in: nearIn, out: nearOut, end: end, done: make(chan struct{})}
	go func() {
		c.err = e.StreamWithContext(life, remotecommand.StreamOptions{Stdin: stdin, Stdout: stdout, Stderr: &c.stderr})
		close(c.done)
		stdin.Close()
		stdout.Close()
	}()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	err := c.greet()
	if !stop() {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// greet reads the greeting, byte by byte: what follows belongs to the API.
func (c *conn) greet() error {
	got := make([]byte, len(greeting))
	if _, err := io.ReadFull(c.out, got); err != nil {
		<-c.done
		return explainExec(c.err, c.stderr.String(), c.agent)
	}
	if string(got) != greeting {
		return explainExec(nil, "", c.agent)
	}
	return nil
}

// Read reads what the agent has sent. It returns io.EOF after the agent has closed, and an
// error if the exec was cut off.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.out.Read(b)
	if errors.Is(err, io.EOF) {
		<-c.done
		if c.err != nil {
			return n, fmt.Errorf("exec in Pod %s ended: %w", c.agent.Pod, c.err)
		}
	}
	return n, err
}

func (c *conn) Write(b []byte) (int, error) { return c.in.Write(b) }

// CloseWrite tells the agent that no more data will follow; Read continues.
func (c *conn) CloseWrite() error { return c.in.Close() }

// Close ends the exec.
func (c *conn) Close() error {
	c.in.Close()
	c.out.Close()
	c.end()
	return nil
}

func (c *conn) LocalAddr() net.Addr  { return addr("this program") }
func (c *conn) RemoteAddr() net.Addr { return addr("node " + c.agent.Node) }

func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}
func (c *conn) SetReadDeadline(t time.Time) error  { return c.out.SetReadDeadline(t) }
func (c *conn) SetWriteDeadline(t time.Time) error { return c.in.SetWriteDeadline(t) }

type addr string

func (addr) Network() string  { return "exec" }
func (a addr) String() string { return string(a) }

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text bytes.Buffer
}

const maxTail = 4096

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text.Write(b)
	t.text.Next(max(0, t.text.Len()-maxTail))
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text.String()
}

// Pipe copies bytes between the standard streams of api-pipe and the agent's API until the
// agent has closed. It writes the greeting when it is connected.
func Pipe(ctx context.Context, api func(context.Context) (net.Conn, error), stdin io.Reader, stdout io.Writer) error {
	agent, err := api(ctx)
	if err != nil {
		return err
	}
	defer agent.Close()
	defer context.AfterFunc(ctx, func() { agent.Close() })()
	if _, err := io.WriteString(stdout, greeting); err != nil {
		return fmt.Errorf("write to client: %w", err)
	}
	go func() {
		// The client that is gone closes stdin. The agent then ends its request.
		_, _ = io.Copy(agent, stdin)
		if half, ok := agent.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
	}()
	if _, err := io.Copy(stdout, agent); err != nil && ctx.Err() == nil {
		return fmt.Errorf("copy from the agent's API: %w", err)
	}
	return nil
}

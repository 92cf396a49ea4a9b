package life

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
)

// closed is a Service whose NodePort refuses: it has no endpoint.
const closed = `
apiVersion: v1
kind: Service
metadata: {name: closed}
spec:
  type: NodePort
  ports: [{port: 80, nodePort: %d}]
`

const closedNodePort = 30084

// viewerWatches follows a refusal on every node by observe.
func viewerWatches(t *testing.T, c *cluster.Cluster, kubeconfig string, observe []string) {
	t.Helper()
	if *proxyMode != "ebpf" {
		return // the others report no events
	}
	clustertest.Must(t, c.Apply(t.Context(), fmt.Sprintf(closed, closedNodePort)))
	defer kubectl(t, c, "delete", "service/closed", "--namespace=default")
	events, stop := follow(t, c, kubeconfig, observe)
	defer stop()
	missing := map[string]bool{}
	for _, n := range c.AllNodes() {
		missing[n.Name()] = true
	}
	await.True(t, "every node refuses, and observe shows it", func() bool {
		for i, n := range c.AllNodes() {
			if missing[n.Name()] {
				get(t, c, i, closedNodePort, "/")
			}
		}
		for {
			select {
			case line := <-events:
				if f := strings.Fields(line); len(f) > 2 && f[2] == "refused" && strings.Contains(line, " default/closed:") {
					delete(missing, f[1])
				}
			default:
				return len(missing) == 0
			}
		}
	})
}

// viewerOpensThePage reads every node's state on the page.
func viewerOpensThePage(t *testing.T, c *cluster.Cluster, kubeconfig string, ui []string) {
	t.Helper()
	lines, stop := follow(t, c, kubeconfig, ui)
	defer stop()
	address := ""
	await.True(t, "spillway ui prints its address", func() bool {
		select {
		case address = <-lines:
			return true
		default:
			return false
		}
	})
	page, err := url.Parse(address)
	clustertest.Must(t, err)
	client := http.Client{Transport: &http.Transport{DialContext: c.Client().Dial, DisableKeepAlives: true}}
	ask := func(method, path string) string {
		r, err := http.NewRequestWithContext(t.Context(), method, "http://"+page.Host+path, strings.NewReader("{}"))
		clustertest.Must(t, err)
		r.Header.Set("Authorization", "Bearer "+strings.TrimPrefix(page.Fragment, "token="))
		r.Header.Set("Content-Type", "application/json")
		answer, err := client.Do(r)
		clustertest.Must(t, err)
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		clustertest.Must(t, err)
		return string(body)
	}
	nodes := ask(http.MethodGet, "/api/nodes")
	for i, n := range c.AllNodes() {
		if !strings.Contains(nodes, fmt.Sprintf(`"id":%d,"name":%q`, i, n.Name())) {
			t.Errorf("the page's nodes: %s, want %s", nodes, n.Name())
		}
		status := ask(http.MethodPost, fmt.Sprintf("/api/node/%d/spillway.node.v1alpha1.NodeService/Status", i))
		if !strings.Contains(status, fmt.Sprintf(`"node":%q`, n.Name())) {
			t.Errorf("the page about %s: %s", n.Name(), status)
		}
	}
}

// follow starts a program on the client outside the cluster, with a kubeconfig, and returns
// the lines of its output. stop ends it as Ctrl-C does.
func follow(t *testing.T, c *cluster.Cluster, kubeconfig string, argv []string) (lines <-chan string, stop func()) {
	t.Helper()
	cmd := c.Client().Command(t.Context(), argv...)
	cmd.Env = append(cmd.Env, "KUBECONFIG="+kubeconfig)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	clustertest.Must(t, err)
	clustertest.Must(t, cmd.Start())
	found, ended := make(chan string, 1000), make(chan struct{})
	go func() {
		defer close(ended)
		for s := bufio.NewScanner(out); s.Scan(); {
			select {
			case found <- s.Text():
			default: // enough of them are there
			}
		}
	}()
	return found, func() {
		t.Helper()
		_ = cmd.Process.Signal(os.Interrupt) // Wait reports that it had ended
		<-ended
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s: %v: %s", strings.Join(argv, " "), err, &errs)
		} else if t.Failed() {
			t.Logf("%s: %s", strings.Join(argv, " "), &errs)
		}
	}
}

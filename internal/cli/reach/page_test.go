package reach_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/cli/ui"
	"spillway.dev/spillway/test/await"
)

type named struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	node string
}

func (a named) Status(context.Context, *nodev1alpha1.StatusRequest) (*nodev1alpha1.StatusResponse, error) {
	return &nodev1alpha1.StatusResponse{Node: a.node}, nil
}

// page is the server of a running "spillway ui".
type page struct {
	t           *testing.T
	host, token string
}

// openPage starts the command, which ends with the test.
func openPage(t *testing.T, args ...string) page {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	out, in := io.Pipe()
	cmd := ui.NewCommand()
	cmd.SetArgs(args)
	cmd.SetOut(in)
	cmd.SetErr(io.Discard)
	end := make(chan error, 1)
	go func() {
		err := cmd.ExecuteContext(ctx)
		in.CloseWithError(err)
		end <- err
	}()
	t.Cleanup(func() {
		stop()
		if err := <-end; err != nil {
			t.Error(err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	address, err := url.Parse(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	return page{t, address.Host, strings.TrimPrefix(address.Fragment, "token=")}
}

// ask returns the body of an answer.
func (p page) ask(method, path string) string {
	p.t.Helper()
	r, err := http.NewRequestWithContext(p.t.Context(), method, "http://"+p.host+path, strings.NewReader("{}"))
	if err != nil {
		p.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+p.token)
	r.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		p.t.Fatal(err)
	}
	defer answer.Body.Close()
	var body bytes.Buffer
	if _, err := body.ReadFrom(answer.Body); err != nil {
		p.t.Fatal(err)
	}
	return body.String()
}

func (p page) nodes() (ids map[string]string, lacks string) {
	p.t.Helper()
	var list struct {
		Lacks string
		Nodes []struct {
			ID   json.Number
			Name string
		}
	}
	if err := json.Unmarshal([]byte(p.ask(http.MethodGet, "/api/nodes")), &list); err != nil {
		p.t.Fatal(err)
	}
	ids = map[string]string{}
	for _, n := range list.Nodes {
		ids[n.Name] = n.ID.String()
	}
	return ids, list.Lacks
}

func (p page) status(id string) string {
	p.t.Helper()
	return p.ask(http.MethodPost, "/api/node/"+id+"/spillway.node.v1alpha1.NodeService/Status")
}

// The page has every node of the cluster. It says of each why it does not answer, and the
// calls to one agent share one exec.
func TestThePageOfAllNodes(t *testing.T) {
	c := reach.NewFakeCluster(t)
	c.Agent("fine", named{node: "fine"})
	c.Bare("bare")
	c.Old("old")
	c.Hanging("hangs")
	p := openPage(t, "--all-nodes", "--kubeconfig", c.Kubeconfig(), "--node-timeout", "2500ms")
	ids, lacks := p.nodes()
	if len(ids) != 4 || lacks != "" {
		t.Fatalf("%v, %q", ids, lacks)
	}
	for range 3 {
		for node, want := range map[string]string{
			"fine":  `"node":"fine"`,
			"bare":  "No agent runs on this node.",
			"old":   "Its agent is older than this program, and has no api-pipe: upgrade it",
			"hangs": "The node does not answer within 2.5s.",
		} {
			if got := p.status(ids[node]); !strings.Contains(got, want) {
				t.Errorf("%s: %s, want %s", node, got, want)
			}
		}
	}
	await.True(t, "one exec runs", func() bool { return c.Execs() == 1 })
}

func TestThePageOfOneNode(t *testing.T) {
	c := reach.NewFakeCluster(t)
	c.Agent("one", named{node: "one"})
	c.Agent("two", named{node: "two"})
	p := openPage(t, "--node", "two", "--kubeconfig", c.Kubeconfig())
	ids, _ := p.nodes()
	if len(ids) != 1 || !strings.Contains(p.status(ids["two"]), `"node":"two"`) {
		t.Errorf("%v", ids)
	}
}

func TestThePageWithoutTheRightToListNodes(t *testing.T) {
	c := reach.NewFakeCluster(t)
	c.Agent("one", named{node: "one"})
	c.Bare("bare")
	c.Deny("nodes")
	p := openPage(t, "--all-nodes", "--kubeconfig", c.Kubeconfig())
	await.NoError(t, func() error {
		ids, lacks := p.nodes()
		if len(ids) != 1 || lacks != "Nodes without an agent are missing: you may not list nodes: bind the ClusterRole spillway-viewer." {
			return fmt.Errorf("%v, %q", ids, lacks)
		}
		return nil
	})
}

// What cannot be shown fails before a page is served, in one line.
func TestPagesThatCannotBe(t *testing.T) {
	c := reach.NewFakeCluster(t)
	c.Agent("one", named{node: "one"})
	c.Bare("bare")
	denied := reach.NewFakeCluster(t)
	denied.Deny("pods kube-system")
	for _, tt := range []struct {
		line, want string
		code       int
	}{
		{"--node none --kubeconfig " + c.Kubeconfig(), `the cluster has no node "none"`, cli.ExitFailed},
		{"--node bare --kubeconfig " + c.Kubeconfig(), "no agent runs on this node", cli.ExitFailed},
		{"--all-nodes --kubeconfig " + reach.NewFakeCluster(t).Kubeconfig(), reach.WithoutAgents, cli.ExitFailed},
		{"--all-nodes --kubeconfig " + denied.Kubeconfig(), "you may not list pods", cli.ExitFailed},
		{"--all-nodes --node one --kubeconfig " + c.Kubeconfig(), "give one of the two", cli.ExitUsage},
		{"--all-nodes --api-socket /x --kubeconfig " + c.Kubeconfig(), "--api-socket is for this machine's agent", cli.ExitUsage},
		{"--kubeconfig " + c.Kubeconfig(), "--kubeconfig is for the agents of other nodes", cli.ExitUsage},
	} {
		var out, errs strings.Builder
		code := cli.Program{Name: "spillway", Commands: []*cobra.Command{ui.NewCommand()}}.Run(append([]string{"ui"}, strings.Fields(tt.line)...),
			&out, &errs)
		if code != tt.code || !strings.Contains(errs.String(), tt.want) || strings.Count(errs.String(), "\n") != 1 || out.Len() > 0 {
			t.Errorf("%s: exit code %d, %q, %q", tt.line, code, &errs, &out)
		}
	}
}

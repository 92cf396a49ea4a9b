package controlplane

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/test/testbed/process"
)

// startEtcd starts etcd with plain HTTP on loopback: it has only the lab's objects.
func (c *ControlPlane) startEtcd(ctx context.Context) (err error) {
	client, peer := "http://127.0.0.1:"+c.etcdPort, "http://127.0.0.1:"+c.peerPort
	c.etcd, err = process.Start(c.cfg.Host, c.path("etcd.log"), []string{c.cfg.Etcd,
		"--name", "lab",
		"--data-dir", c.path("etcd"),
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
		"--initial-cluster", "lab=" + peer,
		"--logger", "zap", "--log-outputs", "stderr",
		"--quota-backend-bytes", "8589934592",
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.StartWithin)
	defer cancel()
	return c.etcd.Until(ctx, func(ctx context.Context) error {
		return c.askEtcd(ctx, http.MethodGet, "/health", nil, nil)
	})
}

// Compact makes etcd and the API server forget old versions. An earlier watch cannot
// continue, and gets 410 Gone. The API server restarts, since it remembers some changes
// itself.
func (c *ControlPlane) Compact(ctx context.Context) error {
	var state struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	if err := c.askEtcd(ctx, http.MethodPost, "/v3/maintenance/status", map[string]any{}, &state); err != nil {
		return fmt.Errorf("compact etcd: %w", err)
	}
	order := map[string]any{"revision": state.Header.Revision, "physical": true}
	if err := c.askEtcd(ctx, http.MethodPost, "/v3/kv/compaction", order, nil); err != nil {
		return fmt.Errorf("compact etcd: %w", err)
	}
	c.StopAPIServer()
	return c.StartAPIServer(ctx)
}

// askEtcd speaks JSON with etcd's gateway.
func (c *ControlPlane) askEtcd(ctx context.Context, method, path string, question, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://127.0.0.1:"+c.etcdPort+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: &http.Transport{DialContext: c.dial, DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("%s: %s: %.300s", path, resp.Status, text)
	case answer == nil:
		return nil
	}
	return json.Unmarshal(text, answer)
}

// dial opens a connection in the namespace of the control plane.
func (c *ControlPlane) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if c.cfg.Host != nil {
		return c.cfg.Host.Dial(ctx, network, address)
	}
	var d net.Dialer
	return d.DialContext(ctx, network, address)
}

// StartAPIServer starts the API server on its previous address, if any, and waits until
// it is ready.
func (c *ControlPlane) StartAPIServer(ctx context.Context) (err error) {
	if c.apiserver, err = process.Start(c.cfg.Host, c.path("kube-apiserver.log"), c.apiServerArgs()); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.StartWithin)
	defer cancel()
	client, err := kubernetes.NewForConfig(c.rest)
	if err != nil {
		return fmt.Errorf("ask kube-apiserver: %w", err)
	}
	return c.apiserver.Until(ctx, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		return client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

// StopAPIServer kills the API server; etcd keeps its objects.
func (c *ControlPlane) StopAPIServer() {
	c.apiserver.Kill()
	c.apiserver = nil
}

func (c *ControlPlane) apiServerArgs() []string {
	var ranges []string
	for _, p := range c.cfg.ServiceCIDRs {
		ranges = append(ranges, p.String())
	}
	args := []string{c.program("kube-apiserver"),
		"--etcd-servers", "http://127.0.0.1:" + c.etcdPort,
		"--secure-port", c.port,
		"--bind-address", c.addrs[0].String(),
		"--advertise-address", c.addrs[0].String(),
		"--cert-dir", c.cfg.Dir,
		"--client-ca-file", c.path("ca.crt"),
		"--tls-cert-file", c.path("apiserver.crt"),
		"--tls-private-key-file", c.path("apiserver.key"),
		"--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", c.path("accounts.key"),
		"--service-account-signing-key-file", c.path("accounts.key"),
		"--service-cluster-ip-range", strings.Join(ranges, ","),
		"--authorization-mode", "RBAC",
		// Creating thousands of objects is not to be slowed down.
		"--enable-priority-and-fairness=false",
		"--max-requests-inflight", "0", "--max-mutating-requests-inflight", "0",
		"--profiling=false",
	}
	if !c.cfg.ServiceAccounts {
		// Tests create Pods, and no controller creates accounts.
		args = append(args, "--disable-admission-plugins", "ServiceAccount")
	}
	if c.cfg.Host == nil {
		// A loopback address may not be an endpoint of default/kubernetes.
		args = append(args, "--endpoint-reconciler-type", "none")
	} else {
		args = append(args, "--endpoint-reconciler-type", "lease")
	}
	return append(args, c.cfg.APIServerArgs...)
}

// startControllerManager starts the selected controllers. It does not wait for them: they
// retry until the API server accepts them.
func (c *ControlPlane) startControllerManager() error {
	kubeconfig, err := c.Kubeconfig(User{Name: "system:kube-controller-manager", Groups: []string{"system:masters"}})
	if err != nil {
		return err
	}
	args := []string{
		c.program("kube-controller-manager"),
		"--kubeconfig", kubeconfig,
		"--controllers", strings.Join(c.cfg.Controllers, ","),
		"--leader-elect=false",
		"--secure-port", "0",
		"--kube-api-qps", "1000", "--kube-api-burst", "1000",
	}
	if c.cfg.ServiceAccounts {
		args = append(args, "--service-account-private-key-file", c.path("accounts.key"), "--root-ca-file", c.path("ca.crt"))
	}
	args = append(args, c.cfg.ControllerManagerArgs...)
	c.controller, err = process.Start(c.cfg.Host, c.path("kube-controller-manager.log"), args)
	return err
}

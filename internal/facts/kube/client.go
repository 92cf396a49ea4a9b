package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"
)

// Access describes how to reach the API server.
type Access struct {
	Kubeconfig string // "" with Master "": as a Pod of the cluster does
	Master     string // overrides the kubeconfig's server
	// QPS and Burst limit requests; 0 is kube-proxy's default, 5 and 10.
	QPS   float32
	Burst int
	// ContentType is "" for protobuf.
	ContentType string
	UserAgent   string
	// Monitor records every answer; nil: answers are not recorded.
	Monitor *ServerMonitor
	// Configure changes the configuration of the clients, for measurements; nil: it stays.
	Configure func(*rest.Config)
}

// Connect returns a client. It sends no request.
func Connect(a Access) (client kubernetes.Interface, server string, err error) {
	cfg, err := a.watchedConfig()
	if err != nil {
		return nil, "", err
	}
	cfg.QPS, cfg.Burst, cfg.UserAgent, cfg.ContentType = a.QPS, a.Burst, a.UserAgent, a.ContentType
	if cfg.ContentType == "" {
		cfg.ContentType = "application/vnd.kubernetes.protobuf"
		cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	}
	c, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, "", fmt.Errorf("connect to API server: %w: %s", err, a.advice())
	}
	if a.Monitor != nil {
		api := c.Discovery().RESTClient()
		a.Monitor.ask = func(ctx context.Context) error {
			return api.Get().AbsPath("/version").MaxRetries(0).Do(ctx).Error()
		}
	}
	return c, host(cfg.Host), nil
}

// ConnectDynamic returns a client for the policies, which are not built in. It sends no
// request.
func ConnectDynamic(a Access) (dynamic.Interface, error) {
	cfg, err := a.watchedConfig()
	if err != nil {
		return nil, err
	}
	cfg.QPS, cfg.Burst, cfg.UserAgent = a.QPS, a.Burst, a.UserAgent
	c, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to API server: %w: %s", err, a.advice())
	}
	return c, nil
}

// watchedConfig returns config with a.Monitor in the path of each request.
func (a Access) watchedConfig() (*rest.Config, error) {
	cfg, err := a.config()
	if err != nil {
		return nil, err
	}
	if a.Monitor != nil {
		cfg.Wrap(a.Monitor.wrap)
	}
	if a.Configure != nil {
		a.Configure(cfg)
	}
	return cfg, nil
}

func (a Access) config() (*rest.Config, error) {
	if strings.ContainsAny(a.Master, "@?#") {
		// Not quoted: it may be a password.
		return nil, errors.New("connect to API server: --master has more than a host, a port and a path: write credentials to a kubeconfig " +
			"and set --kubeconfig")
	}
	if a.Kubeconfig == "" && a.Master == "" {
		cfg, err := rest.InClusterConfig()
		switch {
		case errors.Is(err, rest.ErrNotInCluster):
			return nil, errors.New("connect to API server: no kubeconfig given, and this is not a Pod of a cluster: set --kubeconfig FILE, or " +
				"--manifests DIR")
		case err != nil:
			return nil, fmt.Errorf("connect to API server: read the Pod's account: %w: mount its token, or set --kubeconfig FILE", err)
		}
		return cfg, nil
	}
	if a.Kubeconfig != "" {
		if err := checkKubeconfig(a.Kubeconfig); err != nil {
			return nil, fmt.Errorf("read kubeconfig: %w: %s", err, a.advice())
		}
	}
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: a.Kubeconfig}
	override := &clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: a.Master}}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, override).ClientConfig()
	switch {
	case clientcmd.IsEmptyConfig(err):
		return nil, fmt.Errorf("read kubeconfig: it names no cluster: %s", a.advice())
	case err != nil:
		return nil, fmt.Errorf("connect to API server: %w: %s", err, a.advice())
	}
	return cfg, nil
}

// checkKubeconfig returns an error if a file cannot be read or is no kubeconfig. client-go's
// errors of such files describe its own types, and suggest an environment variable that
// Spillway does not read.
func checkKubeconfig(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	text, err = yaml.YAMLToJSON(text)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	var kind metav1.TypeMeta
	if err := json.Unmarshal(text, &kind); err != nil || kind.Kind != "" && kind.Kind != "Config" || string(text) == "null" {
		return fmt.Errorf("%s: not a kubeconfig", path)
	}
	return nil
}

func (a Access) advice() string {
	if a.Kubeconfig == "" {
		return "fix --master " + a.Master
	}
	return "fix --kubeconfig " + a.Kubeconfig
}

// host removes possible secrets from a server's address.
func host(server string) string {
	if u, err := url.Parse(server); err == nil && u.Host != "" {
		return u.Host
	}
	return server
}

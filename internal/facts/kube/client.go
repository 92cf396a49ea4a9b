package kube

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
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
	// Contact records every answer; nil: answers are not recorded.
	Contact *Contact
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
	if a.Contact != nil {
		asked := c.Discovery().RESTClient()
		a.Contact.ask = func(ctx context.Context) error {
			return asked.Get().AbsPath("/version").MaxRetries(0).Do(ctx).Error()
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

// watchedConfig returns config with a.Contact in the path of each request.
func (a Access) watchedConfig() (*rest.Config, error) {
	cfg, err := a.config()
	if err == nil && a.Contact != nil {
		cfg.Wrap(a.Contact.wrap)
	}
	return cfg, err
}

func (a Access) config() (*rest.Config, error) {
	if strings.ContainsAny(a.Master, "@?#") {
		// Not quoted: it may be a password.
		return nil, errors.New("connect to API server: --master has more than a host, a port and a path: write credentials to a kubeconfig and set --kubeconfig")
	}
	if a.Kubeconfig == "" && a.Master == "" {
		cfg, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("connect to API server: %w: set --kubeconfig, or --manifests DIR to serve files", err)
		}
		return cfg, nil
	}
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: a.Kubeconfig}
	override := &clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: a.Master}}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, override).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("connect to API server: %w: %s", err, a.advice())
	}
	return cfg, nil
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

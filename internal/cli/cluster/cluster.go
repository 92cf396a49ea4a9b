// Package cluster connects commands to the API server as kubectl does.
package cluster

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"spillway.dev/spillway/internal/cli"
)

// Access is the flags --kubeconfig and --context.
type Access struct {
	kubeconfig, context string
}

// group is the name of the flags' group in the help.
const group = "Cluster"

// AddFlags adds the flags.
func (a *Access) AddFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&a.kubeconfig, "kubeconfig", "", "Kubeconfig `file` (default: those of the environment variable KUBECONFIG, "+
		"~/.kube/config, or the Pod's own account).")
	f.StringVar(&a.context, "context", "", "Context of the kubeconfig (default: the current one).")
	cli.GroupFlags(f, group, "kubeconfig", "context")
	cli.Complete(cmd, "context", func() []string {
		config, _ := a.loader().RawConfig() // a shell completes nothing from a bad file
		var names []string
		for name := range config.Contexts {
			names = append(names, name)
		}
		return names
	})
}

func (a *Access) loader() clientcmd.ClientConfig {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = a.kubeconfig
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: a.context})
}

// requestTimeout bounds a single request, of which none watches.
const requestTimeout = 30 * time.Second

// Config returns how to reach the API server. It sends no request.
func (a *Access) Config() (*rest.Config, error) {
	config, err := a.loader().ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, errors.New("connect to API server: no kubeconfig found, and this is not a Pod of a cluster: set --kubeconfig FILE")
	}
	if err != nil {
		return nil, fmt.Errorf("connect to API server: %w: check --kubeconfig and --context", err)
	}
	config.UserAgent, config.Timeout = cli.UserAgent(), requestTimeout
	// A command sends a few dozen requests, once.
	config.QPS, config.Burst = 50, 100
	return config, nil
}

// Connect returns a client of the API server. It sends no request.
func (a *Access) Connect() (kubernetes.Interface, error) {
	config, err := a.Config()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("connect to API server: %w: check --kubeconfig and --context", err)
	}
	return client, nil
}

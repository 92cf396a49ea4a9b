package apiload

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/model"
)

// client is one node's client of the API server.
type client struct {
	*counter
	ready  []<-chan struct{} // closed when it has all objects
	slices atomic.Int64      // changes of EndpointSlices since it was ready
	nodes  atomic.Int64      // changes of Nodes
	// allNodes says that the client hears of every Node.
	allNodes bool
	cancel   context.CancelFunc
	done     sync.WaitGroup
}

func (c *client) stop() {
	c.cancel()
	c.done.Wait()
}

// start starts a client of a kind for a node. kubeconfig is its own: its identity.
func start(kind Kind, node, kubeconfig string) (*client, error) {
	ctx, cancel := context.WithCancel(context.Background())
	c := &client{counter: newCounter(node), allNodes: kind.WatchesNodes || kind.NodesAsMetadata, cancel: cancel}
	begin := c.startAgent
	if kind.Proxy {
		begin = c.startKubeProxy
	}
	err := begin(ctx, kind, kubeconfig)
	if err == nil && kind.NodesAsMetadata {
		err = c.watchNodesAsMetadata(ctx, kubeconfig)
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("start client of %s: %w", node, err)
	}
	return c, nil
}

// startAgent starts the part of Spillway's agent that reads facts, as the command agent
// assembles it.
func (c *client) startAgent(ctx context.Context, kind Kind, kubeconfig string) error {
	access := kube.Access{
		Monitor: kube.NewServerMonitor(), Kubeconfig: kubeconfig, UserAgent: "spillway/apiload",
		ContentType: kind.ContentType, Configure: c.configure,
	}
	api, server, err := kube.Connect(access)
	if err != nil {
		return err
	}
	policies, err := kube.ConnectDynamic(access)
	if err != nil {
		return err
	}
	nodes := kube.NodesConfig{OwnOnly: kind.OwnNodeOnly}
	if kind.WatchesNodes {
		nodes.Most = math.MaxInt
	}
	source, err := kube.New(kube.Config{
		Client: api, Server: server, NodeName: c.node, NetworkPolicies: true, DoNotTrack: policies, Monitor: access.Monitor,
		Nodes: nodes,
	})
	if err != nil {
		return err
	}
	full := c.part()
	c.done.Go(func() {
		_ = source.Run(ctx, func(d model.Delta, _ []model.Problem) { // it returns nil
			if d.Full {
				close(full)
				return
			}
			c.slices.Add(int64(len(d.Slices)))
			c.nodes.Add(int64(len(d.Nodes)))
		})
	})
	return nil
}

// part returns a channel to close when a part of the objects is complete.
func (c *client) part() chan struct{} {
	ch := make(chan struct{})
	c.ready = append(c.ready, ch)
	return ch
}

// wait waits until the client has all objects.
func (c *client) wait(ctx context.Context) error {
	for _, part := range c.ready {
		select {
		case <-part:
		case <-ctx.Done():
			return fmt.Errorf("start client of %s: %w", c.node, context.Cause(ctx))
		}
	}
	return nil
}

// startKubeProxy starts the informers of kube-proxy 1.36: Services, EndpointSlices and
// ServiceCIDRs with its selectors, and its own Node.
func (c *client) startKubeProxy(ctx context.Context, kind Kind, kubeconfig string) error {
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	// The defaults of its configuration.
	cfg.QPS, cfg.Burst, cfg.UserAgent = 5, 10, "kube-proxy/apiload"
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	c.configure(cfg)
	api, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	factory := func(fields, labels string) informers.SharedInformerFactory {
		return informers.NewSharedInformerFactoryWithOptions(api, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector, o.LabelSelector = fields, labels
		}))
	}
	services := factory("spec.clusterIP!=None", "!service.kubernetes.io/service-proxy-name")
	slices := factory("", "!"+corev1.IsHeadlessService)
	all := factory("", "")
	own := factory("metadata.name="+c.node, "")
	synced := []cache.InformerSynced{
		services.Core().V1().Services().Informer().HasSynced,
		all.Networking().V1().ServiceCIDRs().Informer().HasSynced,
	}
	for _, watched := range []struct {
		informer cache.SharedIndexInformer
		changes  *atomic.Int64
	}{{slices.Discovery().V1().EndpointSlices().Informer(), &c.slices}, {own.Core().V1().Nodes().Informer(), &c.nodes}} {
		handle, err := watched.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			UpdateFunc: func(any, any) { watched.changes.Add(1) },
		})
		if err != nil {
			return err
		}
		synced = append(synced, handle.HasSynced)
	}
	for _, f := range []informers.SharedInformerFactory{services, slices, all, own} {
		f.StartWithContext(ctx)
		c.done.Go(func() { <-ctx.Done(); f.Shutdown() })
	}
	c.await(ctx, synced...)
	return nil
}

// watchNodesAsMetadata watches all Nodes in the form that has their metadata only.
func (c *client) watchNodesAsMetadata(ctx context.Context, kubeconfig string) error {
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	c.configure(cfg)
	api, err := metadata.NewForConfig(metadata.ConfigFor(cfg))
	if err != nil {
		return err
	}
	f := metadatainformer.NewFilteredMetadataInformer(api, corev1.SchemeGroupVersion.WithResource("nodes"), "", 0, cache.Indexers{}, nil)
	err = f.Informer().SetTransform(func(obj any) (any, error) {
		if o, ok := obj.(*metav1.PartialObjectMetadata); ok {
			o.ManagedFields, o.Annotations = nil, nil
		}
		return obj, nil
	})
	if err != nil {
		return err
	}
	handle, err := f.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: func(any, any) { c.nodes.Add(1) }})
	if err != nil {
		return err
	}
	c.done.Go(func() { f.Informer().RunWithContext(ctx) })
	c.await(ctx, handle.HasSynced)
	return nil
}

// await adds a part that is complete when informers are.
func (c *client) await(ctx context.Context, synced ...cache.InformerSynced) {
	done := c.part()
	c.done.Go(func() {
		if cache.WaitForCacheSync(ctx.Done(), synced...) {
			close(done)
		}
	})
}

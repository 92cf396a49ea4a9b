package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/test/testbed/controlplane"
)

// API is a real API server on a machine of its own, the lab's last client. What
// is written there is written by server-side apply, as kubectl would.
type API struct {
	*controlplane.ControlPlane
	Kubeconfig string // with full privileges

	client dynamic.Interface
	mu     sync.Mutex
	there  map[string]map[objectKey]bool // what Apply has left in each namespace
}

// objectKey names an object within a namespace.
type objectKey struct {
	resource schema.GroupVersionResource
	name     string
}

// resources are the kinds that cases are made of, in the order in which they are
// written: an agent that knows a Service knows the policies, too.
var resources = []struct {
	kind     string
	resource schema.GroupVersionResource
	status   bool // what it says of status is written too
}{
	{"Pod", schema.GroupVersionResource{Version: "v1", Resource: "pods"}, true},
	{"NetworkPolicy", schema.GroupVersionResource{Group: "networking.k8s.io", Version: "v1", Resource: "networkpolicies"}, false},
	{"EndpointSlice", schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"}, false},
	{"Service", schema.GroupVersionResource{Version: "v1", Resource: "services"}, true},
}

func (c *Cluster) apiDir() string { return filepath.Join(c.Dir, "api") }

// startAPI starts the control plane, in memory since etcd waits for every write, and
// writes the Nodes.
func (c *Cluster) startAPI(ctx context.Context) error {
	dir := c.apiDir()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("start API server: %w", err)
	}
	if err := unix.Mount("api", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700"); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", dir, err)
	}
	cp, err := controlplane.Up(ctx, controlplane.Config{Dir: dir, Host: c.Lab.Client(c.Spec.Clients - 1)})
	if err != nil {
		return err
	}
	c.API = &API{ControlPlane: cp, there: map[string]map[objectKey]bool{}}
	if c.API.Kubeconfig, err = cp.AdminKubeconfig(); err != nil {
		return err
	}
	if c.API.client, err = dynamic.NewForConfig(cp.REST()); err != nil {
		return fmt.Errorf("open client: %w", err)
	}
	k, err := kubernetes.NewForConfig(cp.REST())
	if err != nil {
		return fmt.Errorf("open client: %w", err)
	}
	for _, node := range c.Lab.NodeObjects() {
		if _, err := k.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create Node: %w", err)
		}
	}
	return nil
}

// Apply makes a namespace hold these objects, and deletes the other objects of earlier
// calls. It first deletes, then writes objects of one kind at once, and writes last
// after all others.
func (a *API) Apply(ctx context.Context, namespace string, objects []runtime.Object, last []runtime.Object) error {
	want := map[objectKey]bool{}
	list, err := decode(append(append([]runtime.Object{}, objects...), last...))
	if err != nil {
		return err
	}
	for _, o := range list {
		want[o.key] = true
	}
	a.mu.Lock()
	have, known := a.there[namespace]
	a.there[namespace] = want
	a.mu.Unlock()
	if !known {
		ns := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Namespace",
			"metadata": map[string]any{"name": namespace}}}
		if _, err := a.client.Resource(corev1.SchemeGroupVersion.WithResource("namespaces")).Create(ctx, ns, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create namespace: %w", err)
		}
	}
	for key := range have {
		if !want[key] {
			if err := a.delete(ctx, namespace, key); err != nil {
				return err
			}
		}
	}
	for _, part := range [][]object{list[:len(list)-len(last)], list[len(list)-len(last):]} {
		if err := a.applyAll(ctx, namespace, part); err != nil {
			return err
		}
	}
	return nil
}

// object is one to be written.
type object struct {
	*unstructured.Unstructured
	key    objectKey
	status map[string]any
}

func decode(objects []runtime.Object) ([]object, error) {
	var list []object
	for _, o := range objects {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
		if err != nil {
			return nil, fmt.Errorf("write object: %w", err)
		}
		u := object{Unstructured: &unstructured.Unstructured{Object: content}}
		u.status, _, _ = unstructured.NestedMap(content, "status")
		unstructured.RemoveNestedField(content, "status")
		unstructured.RemoveNestedField(content, "metadata", "creationTimestamp")
		for _, r := range resources {
			if r.kind != u.GetKind() {
				continue
			}
			u.key = objectKey{r.resource, u.GetName()}
			if !r.status {
				u.status = nil
			}
		}
		if u.key.name == "" {
			return nil, fmt.Errorf("write object: a %s is not among the kinds of cases", u.GetKind())
		}
		list = append(list, u)
	}
	return list, nil
}

// applyAll writes the objects kind by kind.
func (a *API) applyAll(ctx context.Context, namespace string, list []object) error {
	for _, r := range resources {
		g, ctx := errgroup.WithContext(ctx)
		g.SetLimit(8)
		for _, o := range list {
			if o.key.resource == r.resource {
				g.Go(func() error { return a.apply(ctx, namespace, o) })
			}
		}
		if err := g.Wait(); err != nil {
			return err
		}
	}
	return nil
}

// apply writes one object. What may not change in it makes it a new one.
func (a *API) apply(ctx context.Context, namespace string, o object) error {
	_, err := a.patch(ctx, namespace, o)
	if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) {
		if gone := a.delete(ctx, namespace, o.key); gone == nil {
			_, err = a.patch(ctx, namespace, o)
		}
	}
	if err == nil && len(o.status) > 0 {
		o.Object["status"] = o.status
		_, err = a.patch(ctx, namespace, o, "status")
	}
	if err != nil {
		return fmt.Errorf("apply %s %s/%s: %w", o.GetKind(), namespace, o.GetName(), err)
	}
	return nil
}

func (a *API) patch(ctx context.Context, namespace string, o object, sub ...string) (*unstructured.Unstructured, error) {
	text, err := json.Marshal(o.Object)
	if err != nil {
		return nil, err
	}
	force := true
	return a.client.Resource(o.key.resource).Namespace(namespace).Patch(ctx, o.GetName(), "application/apply-patch+yaml", text,
		metav1.PatchOptions{FieldManager: "flows", Force: &force}, sub...)
}

func (a *API) delete(ctx context.Context, namespace string, key objectKey) error {
	now := int64(0) // a Pod waits for a kubelet otherwise
	err := a.client.Resource(key.resource).Namespace(namespace).Delete(ctx, key.name, metav1.DeleteOptions{GracePeriodSeconds: &now})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s %s/%s: %w", key.resource.Resource, namespace, key.name, err)
	}
	return nil
}

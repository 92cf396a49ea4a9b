package reach

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"spillway.dev/spillway/internal/escape"
)

const (
	// selector finds the agents' DaemonSet and its Pods, as the chart labels them. It proves
	// nothing: every author of Pods may set a label.
	selector = "app.kubernetes.io/name=spillway"
	// bindingSelector finds the ClusterRoleBinding of the agents' ServiceAccount.
	bindingSelector = selector + ",app.kubernetes.io/component=agent"
	// container is the agent's, in its Pod.
	container = "agent"
	// UsualNamespace is where the documents install the chart.
	UsualNamespace = metav1.NamespaceSystem
)

// finder finds the agents' Pods and proves that they are the agents'.
// docs/adr/0053-proof-of-agents.md has the reasons.
type finder struct {
	client kubernetes.Interface
	given  string // the namespace that the user named; "": it is searched

	mu    sync.Mutex
	known string // the namespace that was found
}

// Pods are the Pods with the agents' label in the agents' namespace.
type Pods struct {
	Namespace  string
	Agents     []*corev1.Pod
	Unverified []UnverifiedPod
}

// UnverifiedPod is a Pod that only looks like an agent.
type UnverifiedPod struct {
	Pod *corev1.Pod
	Err *Error
}

// List reads all pages of a list.
func List[P, L runtime.Object](ctx context.Context, options metav1.ListOptions,
	page func(context.Context, metav1.ListOptions) (L, error)) (items []P, err error) {
	all, _, err := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return page(ctx, o) }).List(ctx,
		options)
	if err != nil {
		return nil, err
	}
	err = meta.EachListItem(all, func(o runtime.Object) error {
		items = append(items, o.(P))
		return nil
	})
	return items, err
}

// namespace returns the namespace of the agents. Without a name from the user, it believes
// what only administrators write: ClusterRoleBindings, and objects in kube-system.
func (f *finder) namespace(ctx context.Context) (string, error) {
	if f.given != "" {
		return f.given, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known != "" {
		return f.known, nil
	}
	bindings, err := List[*rbacv1.ClusterRoleBinding](ctx, metav1.ListOptions{LabelSelector: bindingSelector},
		f.client.RbacV1().ClusterRoleBindings().List)
	if err != nil && !apierrors.IsForbidden(err) {
		return "", fmt.Errorf("find the agents' namespace: list ClusterRoleBindings: %s", escape.OneLine(err))
	}
	var found []string
	for _, b := range bindings {
		for _, s := range b.Subjects {
			if s.Kind == rbacv1.ServiceAccountKind {
				found = append(found, s.Namespace)
			}
		}
	}
	slices.Sort(found)
	found = slices.Compact(found)
	if len(found) > 1 {
		return "", &Error{Failed, fmt.Sprintf("agents have ClusterRoleBindings in several namespaces (%s): choose one with --agent-namespace",
			escape.Text(strings.Join(found, ", ")))}
	}
	f.known = append(found, UsualNamespace)[0]
	return f.known, nil
}

// forget has the next call search the namespace again.
func (f *finder) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.known = ""
}

// listError explains why a list in the agents' namespace cannot be read.
func (f *finder) listError(what, namespace string, err error) error {
	if !apierrors.IsForbidden(err) {
		return fmt.Errorf("find the agents: list %s in namespace %s: %s", what, escape.Text(namespace), escape.OneLine(err))
	}
	text := fmt.Sprintf("you may not list %s in namespace %s: bind the Role spillway-viewer of that namespace, from this version's chart",
		what, escape.Text(namespace))
	if f.given == "" {
		text += ", or name another with --agent-namespace"
	}
	return &Error{Forbidden, text}
}

// daemonSets returns the DaemonSets in the agents' namespace that run agents; at least one.
func (f *finder) daemonSets(ctx context.Context, namespace string) (map[types.UID]*appsv1.DaemonSet, error) {
	all, err := List[*appsv1.DaemonSet](ctx, metav1.ListOptions{LabelSelector: selector}, f.client.AppsV1().DaemonSets(namespace).List)
	if err != nil {
		return nil, f.listError("daemonsets", namespace, err)
	}
	sets := map[types.UID]*appsv1.DaemonSet{}
	for _, s := range all {
		if o := originOf(&s.Spec.Template.Spec); o.hostNetwork && o.image != "" {
			sets[s.UID] = s
		}
	}
	if len(sets) == 0 {
		f.forget()
		return nil, &Error{NoAgent, fmt.Sprintf("namespace %s has no DaemonSet of agents (label %s, container %s, hostNetwork): name the "+
			"agents' namespace with --agent-namespace, or install Spillway", escape.Text(namespace), selector, container)}
	}
	return sets, nil
}

// pods returns the Pods with the agents' label, of a node or of all nodes for "", sorted by
// node and name. It reads Pods before DaemonSets, and those before their revisions: so what
// a Pod was made of is not newer than what it is compared with.
func (f *finder) pods(ctx context.Context, node string) (*Pods, error) {
	namespace, err := f.namespace(ctx)
	if err != nil {
		return nil, err
	}
	options := metav1.ListOptions{LabelSelector: selector}
	if node != "" {
		options.FieldSelector = "spec.nodeName=" + node
	}
	all, err := List[*corev1.Pod](ctx, options, f.client.CoreV1().Pods(namespace).List)
	if err != nil {
		return nil, f.listError("pods", namespace, err)
	}
	sets, err := f.daemonSets(ctx, namespace)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(all, func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Spec.NodeName, b.Spec.NodeName), cmp.Compare(a.Name, b.Name))
	})
	found := &Pods{Namespace: namespace}
	p := verifier{finder: f, namespace: namespace, sets: sets}
	for _, pod := range all {
		lacks, err := p.lacks(ctx, pod)
		switch {
		case err != nil:
			return nil, err
		case lacks == "":
			found.Agents = append(found.Agents, pod)
		default:
			found.Unverified = append(found.Unverified, UnverifiedPod{pod, &Error{NotProven, fmt.Sprintf(
				"Pod %s has the agents' label but is no agent: %s: see 'kubectl -n %s get pod %[1]s -o yaml', and delete it if it is not yours",
				pod.Name, lacks, pod.Namespace)}})
		}
	}
	return found, nil
}

// verifier compares Pods with the DaemonSets that are there.
type verifier struct {
	*finder
	namespace string
	sets      map[types.UID]*appsv1.DaemonSet
	revisions map[types.UID][]origin // nil: not read yet
}

// origin is what a Pod keeps of its template. Admission may change other fields.
type origin struct {
	hostNetwork    bool
	account, image string
}

func originOf(spec *corev1.PodSpec) origin {
	o := origin{hostNetwork: spec.HostNetwork, account: cmp.Or(spec.ServiceAccountName, "default")}
	for _, c := range spec.Containers {
		if c.Name == container {
			o.image = c.Image
		}
	}
	return o
}

// lacks returns what a Pod lacks to be an agent; "": nothing.
func (p *verifier) lacks(ctx context.Context, pod *corev1.Pod) (string, error) {
	owner := metav1.GetControllerOf(pod)
	if owner == nil {
		return "no DaemonSet owns it", nil
	}
	// The API server chooses UIDs. A name may be that of a DaemonSet that was deleted.
	set := p.sets[owner.UID]
	if set == nil {
		return fmt.Sprintf("its owner, %s %s with UID %s, is no DaemonSet of agents in this namespace", escape.Text(owner.Kind),
			escape.Text(owner.Name), escape.Text(string(owner.UID))), nil
	}
	got, want := originOf(&pod.Spec), originOf(&set.Spec.Template.Spec)
	if got == want {
		return "", nil
	}
	// An update leaves Pods of earlier templates for a while.
	if err := p.readRevisions(ctx); apierrors.IsForbidden(err) {
		return got.difference(want, set) + ", and you may not list controllerrevisions, which have earlier templates", nil
	} else if err != nil {
		return "", p.listError("controllerrevisions", p.namespace, err)
	}
	if slices.Contains(p.revisions[set.UID], got) {
		return "", nil
	}
	return got.difference(want, set), nil
}

func (got origin) difference(want origin, set *appsv1.DaemonSet) string {
	switch {
	case got.hostNetwork != want.hostNetwork:
		return fmt.Sprintf("it is not on the host network, unlike the Pods of DaemonSet %s", set.Name)
	case got.account != want.account:
		return fmt.Sprintf("its ServiceAccount is %s, and that of DaemonSet %s is %s", escape.Text(got.account), set.Name,
			escape.Text(want.account))
	}
	return fmt.Sprintf("its image is %s, and DaemonSet %s has %s", escape.Text(got.image), set.Name, escape.Text(want.image))
}

// readRevisions reads the templates that the DaemonSets have or had.
func (p *verifier) readRevisions(ctx context.Context) error {
	if p.revisions != nil {
		return nil
	}
	// The DaemonSet controller labels them as the template.
	all, err := List[*appsv1.ControllerRevision](ctx, metav1.ListOptions{LabelSelector: selector},
		p.client.AppsV1().ControllerRevisions(p.namespace).List)
	if err != nil {
		return err
	}
	p.revisions = map[types.UID][]origin{}
	for _, r := range all {
		// A patch of the DaemonSet with its whole template.
		var patch struct {
			Spec struct{ Template corev1.PodTemplateSpec }
		}
		if owner := metav1.GetControllerOf(r); owner != nil && json.Unmarshal(r.Data.Raw, &patch) == nil {
			p.revisions[owner.UID] = append(p.revisions[owner.UID], originOf(&patch.Spec.Template.Spec))
		}
	}
	return nil
}

// Image returns the image of the agents and its pull policy, from the template of their
// DaemonSet. namespace is the agents'; "": it is searched.
func Image(ctx context.Context, client kubernetes.Interface, namespace string) (image string, pull corev1.PullPolicy, err error) {
	f := &finder{client: client, given: namespace}
	if namespace, err = f.namespace(ctx); err != nil {
		return "", "", err
	}
	sets, err := f.daemonSets(ctx, namespace)
	if err != nil {
		return "", "", err
	}
	for _, s := range sets {
		for _, c := range s.Spec.Template.Spec.Containers {
			switch {
			case c.Name != container:
			case image != "" && image != c.Image:
				return "", "", &Error{Failed, fmt.Sprintf("the DaemonSets of agents in namespace %s have several images", escape.Text(namespace))}
			default:
				image, pull = c.Image, c.ImagePullPolicy
			}
		}
	}
	return image, pull, nil
}

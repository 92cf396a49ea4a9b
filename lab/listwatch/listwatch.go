package listwatch

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	internalscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
)

// Server is an http.Handler with the paths of an API server.
type Server struct {
	store *store
	mux   http.ServeMux
}

// New returns a server of some objects.
func New(objects ...runtime.Object) (*Server, error) {
	s := &Server{store: newStore()}
	if err := s.Apply(objects...); err != nil {
		return nil, err
	}
	s.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { fail(w, r, unknown(r)) })
	for _, group := range []string{"/api/{version}", "/apis/{group}/{version}"} {
		for _, namespace := range []string{"", "/namespaces/{namespace}"} {
			s.mux.HandleFunc(group+namespace+"/{resource}", s.serve)
			s.mux.HandleFunc(group+namespace+"/{resource}/{name}", s.serve)
		}
	}
	return s, nil
}

// Apply creates or replaces objects, in this order. It copies them.
func (s *Server) Apply(objects ...runtime.Object) error {
	for _, o := range objects {
		if err := s.store.apply(o); err != nil {
			return err
		}
	}
	return nil
}

// Delete deletes an object of this kind, namespace and name; it must exist.
func (s *Server) Delete(o runtime.Object) error { return s.store.remove(o) }

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.mux.ServeHTTP(w, r) }

// request is a request for objects of one kind.
type request struct {
	resource schema.GroupVersionResource
	kind     schema.GroupVersionKind
	name     types.NamespacedName // both, one or no part
	encoding runtime.SerializerInfo
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	q := request{
		resource: schema.GroupVersionResource{Group: r.PathValue("group"), Version: r.PathValue("version"), Resource: r.PathValue("resource")},
		name:     types.NamespacedName{Namespace: r.PathValue("namespace"), Name: r.PathValue("name")},
	}
	var known, ok bool
	q.kind, known = kinds[q.resource]
	q.encoding, ok = negotiate(r)
	var err error
	switch {
	case !known:
		err = unknown(r)
	case !ok:
		err = errors.NewGenericServerResponse(http.StatusNotAcceptable, r.Method, q.resource.GroupResource(), q.name.Name,
			"use Accept: application/json", 0, true)
	case r.Method == http.MethodPost && q.resource.Resource == "events" && q.name.Name == "":
		accept(w, r)
	case r.Method != http.MethodGet:
		err = errors.NewMethodNotSupported(q.resource.GroupResource(), r.Method)
	case q.name.Name != "":
		err = s.get(w, q)
	default:
		err = s.read(w, r, q)
	}
	if err != nil {
		fail(w, r, err)
	}
}

// unknown is the error for a path that leads to nothing.
func unknown(r *http.Request) error {
	return errors.NewGenericServerResponse(http.StatusNotFound, r.Method, schema.GroupResource{}, "", "", 0, true)
}

func (s *Server) get(w http.ResponseWriter, q request) error {
	o := s.store.get(q.kind, q.name)
	if o == nil {
		return errors.NewNotFound(q.resource.GroupResource(), q.name.Name)
	}
	return write(w, q.encoding, http.StatusOK, o)
}

// read lists or watches.
func (s *Server) read(w http.ResponseWriter, r *http.Request, q request) error {
	var opts internalversion.ListOptions
	if err := internalscheme.ParameterCodec.DecodeParameters(r.URL.Query(), metav1.SchemeGroupVersion, &opts); err != nil {
		return errors.NewBadRequest(err.Error())
	}
	if errs := validation.ValidateListOptions(&opts, true); len(errs) > 0 {
		return errors.NewInvalid(metav1.SchemeGroupVersion.WithKind("ListOptions").GroupKind(), "", errs)
	}
	sel, err := newSelection(q, &opts)
	if err != nil {
		return errors.NewBadRequest(err.Error())
	}
	from, err := s.from(&opts)
	if err != nil {
		return err
	}
	if opts.Watch {
		return s.watch(w, r, q, &opts, sel, from)
	}
	objects, version := s.store.list(q.kind, sel)
	list, err := scheme.Scheme.New(listOf(q.kind))
	if err != nil {
		return errors.NewInternalError(err)
	}
	if err := meta.SetList(list, objects); err != nil {
		return errors.NewInternalError(err)
	}
	list.GetObjectKind().SetGroupVersionKind(listOf(q.kind))
	list.(metav1.ListInterface).SetResourceVersion(format(version))
	return write(w, q.encoding, http.StatusOK, list)
}

// from returns the version that a request names, 0 for any. With a version of an earlier
// server the client has to list again.
func (s *Server) from(opts *internalversion.ListOptions) (uint64, error) {
	if opts.ResourceVersion == "" {
		return 0, nil
	}
	version, err := strconv.ParseUint(opts.ResourceVersion, 10, 64)
	if err != nil {
		return 0, errors.NewBadRequest(fmt.Sprintf("resourceVersion: Invalid value: %q", opts.ResourceVersion))
	}
	if version > 0 && version < s.store.first {
		return 0, errors.NewResourceExpired(fmt.Sprintf("too old resource version: %d (%d)", version, s.store.first))
	}
	return version, nil
}

// watch sends changes until the client leaves or its timeout ends.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, q request, opts *internalversion.ListOptions,
	sel selection, from uint64) error {
	var timeout <-chan time.Time
	if opts.TimeoutSeconds != nil {
		timeout = time.After(time.Duration(*opts.TimeoutSeconds) * time.Second)
	}
	out := newEvents(w, q)
	initial := from == 0
	if opts.SendInitialEvents != nil {
		initial = *opts.SendInitialEvents
	}
	objects, version := s.store.list(q.kind, sel)
	if initial {
		for _, o := range objects {
			out.send(watch.Added, o)
		}
		if opts.SendInitialEvents != nil && opts.AllowWatchBookmarks {
			out.bookmark(version, map[string]string{metav1.InitialEventsAnnotationKey: "true"})
		}
	}
	if initial || from == 0 {
		from = version
	}
	for {
		changes, version, next := s.store.since(q.kind, from)
		for _, c := range changes {
			if kind, o := sel.event(c); o != nil {
				out.send(kind, o)
			}
		}
		from = version
		if out.flush(); out.err != nil {
			return nil // the client has left
		}
		select {
		case <-next:
		case <-r.Context().Done():
			return nil
		case <-timeout:
			if opts.AllowWatchBookmarks {
				out.bookmark(from, nil)
				out.flush()
			}
			return nil
		}
	}
}

// selection is the part of a kind's objects that a request selects.
type selection struct {
	namespace string // "" for all
	labels    labels.Selector
	fields    fields.Selector
}

func newSelection(q request, opts *internalversion.ListOptions) (selection, error) {
	sel := selection{q.name.Namespace, labels.Everything(), fields.Everything()}
	if opts.LabelSelector != nil {
		sel.labels = opts.LabelSelector
	}
	if opts.FieldSelector != nil {
		sel.fields = opts.FieldSelector
	}
	known, err := scheme.Scheme.New(q.kind)
	if err != nil {
		return sel, err
	}
	for _, r := range sel.fields.Requirements() {
		if !fieldsOf(known.(object)).Has(r.Field) {
			return sel, fmt.Errorf("field label not supported: %s", r.Field)
		}
	}
	return sel, nil
}

// fieldsOf returns the fields that a selector may name: each kind's name, and what
// kube-proxy and Spillway select by.
func fieldsOf(o object) fields.Set {
	set := fields.Set{metav1.ObjectNameField: o.GetName(), "metadata.namespace": o.GetNamespace()}
	switch o := o.(type) {
	case *corev1.Service:
		set["spec.clusterIP"] = o.Spec.ClusterIP
	case *corev1.Pod:
		set["spec.nodeName"] = o.Spec.NodeName
	}
	return set
}

// matches is false for nil.
func (sel selection) matches(o object) bool {
	return o != nil && (sel.namespace == "" || sel.namespace == o.GetNamespace()) &&
		sel.labels.Matches(labels.Set(o.GetLabels())) &&
		sel.fields.Matches(fieldsOf(o))
}

// event returns the event of a change for this selection, nil for none: a change may
// bring an object into it or out of it.
func (sel selection) event(c change) (watch.EventType, object) {
	switch before, after := sel.matches(c.before), sel.matches(c.after); {
	case before && after:
		return watch.Modified, c.after
	case after:
		return watch.Added, c.after
	case before:
		// The version of the deletion, from which a client continues.
		last := c.before.DeepCopyObject().(object)
		last.SetResourceVersion(format(c.version))
		return watch.Deleted, last
	}
	return "", nil
}

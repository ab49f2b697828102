# SPDX-License-Identifier: Apache-2.0
"""The prototypes of the functions for graphs."""

PROTOTYPES = """
// Graphs
cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    const CUgraphEdgeData* dependencyData[numDependencies] @uncounted, size_t numDependencies,
    CUstreamCaptureMode mode);
cuGraphCreate(CUgraph* phGraph, unsigned int flags);
cuGraphAddKernelNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS* nodeParams @node);
cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS* nodeParams @node);
cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS* nodeParams @node);
cuGraphAddMemcpyNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, const CUDA_MEMCPY3D* copyParams @node, CUcontext ctx);
cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D* nodeParams @node);
cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D* nodeParams @node);
cuGraphAddMemsetNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS* memsetParams, CUcontext ctx);
cuGraphMemsetNodeGetParams(CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS* nodeParams);
cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS* nodeParams);
cuGraphAddHostNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, const CUDA_HOST_NODE_PARAMS* nodeParams @node);
cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS* nodeParams @node);
cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS* nodeParams @node);
cuGraphAddChildGraphNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, CUgraph childGraph);
cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph* phGraph);
cuGraphAddEmptyNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies);
cuGraphAddEventRecordNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, CUevent event);
cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent* event_out);
cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent event);
cuGraphAddEventWaitNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, CUevent event);
cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent* event_out);
cuGraphEventWaitNodeSetEvent(CUgraphNode hNode, CUevent event);
cuGraphAddBatchMemOpNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams @node);
cuGraphBatchMemOpNodeGetParams(CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams_out @node);
cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams @node);
cuGraphExecBatchMemOpNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
    const CUDA_BATCH_MEM_OP_NODE_PARAMS* nodeParams @node);
cuGraphAddMemAllocNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, in CUDA_MEM_ALLOC_NODE_PARAMS* nodeParams @filled);
cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS* params_out @node);
cuGraphAddMemFreeNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, CUdeviceptr dptr);
cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr* dptr_out);
cuDeviceGraphMemTrim(CUdevice device);
cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void* value @attribute);
cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, in void* value @attribute);
cuGraphClone(CUgraph* phGraphClone, CUgraph originalGraph);
cuGraphNodeFindInClone(CUgraphNode* phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph);
cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType* type);
cuGraphGetNodes(CUgraph hGraph, CUgraphNode* nodes[numNodes], inout size_t* numNodes);
cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode* rootNodes[numRootNodes], inout size_t* numRootNodes);
12: cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from_[numEdges], CUgraphNode* to[numEdges], inout size_t* numEdges);
13: cuGraphGetEdges(CUgraph hGraph, CUgraphNode* from_[numEdges], CUgraphNode* to[numEdges],
    CUgraphEdgeData* edgeData[numEdges], inout size_t* numEdges);
12: cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode* from_[numEdges], CUgraphNode* to[numEdges],
    CUgraphEdgeData* edgeData[numEdges], inout size_t* numEdges);
12: cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode* dependencies[numDependencies],
    inout size_t* numDependencies);
13: cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode* dependencies[numDependencies],
    CUgraphEdgeData* edgeData[numDependencies], inout size_t* numDependencies);
12: cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode* dependencies[numDependencies],
    CUgraphEdgeData* edgeData[numDependencies], inout size_t* numDependencies);
12: cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode* dependentNodes[numDependentNodes],
    inout size_t* numDependentNodes);
13: cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode* dependentNodes[numDependentNodes],
    CUgraphEdgeData* edgeData[numDependentNodes], inout size_t* numDependentNodes);
12: cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode* dependentNodes[numDependentNodes],
    CUgraphEdgeData* edgeData[numDependentNodes], inout size_t* numDependentNodes);
12: cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode* from_[numDependencies] @uncounted,
    const CUgraphNode* to[numDependencies] @uncounted, size_t numDependencies);
13: cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode* from_[numDependencies] @uncounted,
    const CUgraphNode* to[numDependencies] @uncounted, const CUgraphEdgeData* edgeData[numDependencies] @uncounted,
    size_t numDependencies);
12: cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode* from_[numDependencies] @uncounted,
    const CUgraphNode* to[numDependencies] @uncounted, const CUgraphEdgeData* edgeData[numDependencies] @uncounted,
    size_t numDependencies);
12: cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode* from_[numDependencies] @uncounted,
    const CUgraphNode* to[numDependencies] @uncounted, size_t numDependencies);
13: cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode* from_[numDependencies] @uncounted,
    const CUgraphNode* to[numDependencies] @uncounted, const CUgraphEdgeData* edgeData[numDependencies] @uncounted,
    size_t numDependencies);
12: cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode* from_[numDependencies] @uncounted,
    const CUgraphNode* to[numDependencies] @uncounted, const CUgraphEdgeData* edgeData[numDependencies] @uncounted,
    size_t numDependencies);
cuGraphDestroyNode(CUgraphNode hNode);
cuGraphInstantiate(CUgraphExec* phGraphExec, CUgraph hGraph, unsigned long long flags);
cuGraphInstantiateWithParams(CUgraphExec* phGraphExec, CUgraph hGraph,
    in CUDA_GRAPH_INSTANTIATE_PARAMS* instantiateParams @filled);
cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t* flags);
cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
    const CUDA_KERNEL_NODE_PARAMS* nodeParams @node);
cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D* copyParams @node,
    CUcontext ctx);
cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS* memsetParams,
    CUcontext ctx);
cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS* nodeParams @node);
cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph);
cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event);
cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event);
cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled);
cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int* isEnabled);
cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream);
cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream);
cuGraphExecDestroy(CUgraphExec hGraphExec);
cuGraphDestroy(CUgraph hGraph);
cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo* resultInfo);
cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src);
cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue* value_out);
cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue* value);
cuGraphDebugDotPrint(CUgraph hGraph, const char* path, unsigned int flags);
cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags);
cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count);
12: cuGraphAddNode(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    size_t numDependencies, in CUgraphNodeParams* nodeParams @filled);
13: cuGraphAddNode(CUgraphNode* phGraphNode, CUgraph hGraph,
    const CUgraphNode* dependencies[numDependencies] @uncounted,
    const CUgraphEdgeData* dependencyData[numDependencies] @uncounted, size_t numDependencies,
    in CUgraphNodeParams* nodeParams @filled);
12: cuGraphAddNode_v2(CUgraphNode* phGraphNode, CUgraph hGraph, const CUgraphNode* dependencies[numDependencies],
    const CUgraphEdgeData* dependencyData[numDependencies], size_t numDependencies,
    in CUgraphNodeParams* nodeParams @filled);
cuGraphNodeSetParams(CUgraphNode hNode, in CUgraphNodeParams* nodeParams @node);
cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, in CUgraphNodeParams* nodeParams @node);
13: cuGraphNodeGetContainingGraph(CUgraphNode hNode, CUgraph* phGraph);
13: cuGraphNodeGetLocalId(CUgraphNode hNode, unsigned int* nodeId);
13: cuGraphNodeGetToolsId(CUgraphNode hNode, unsigned long long* toolsNodeId);
13: cuGraphGetId(CUgraph hGraph, unsigned int* graphId);
13: cuGraphExecGetId(CUgraphExec hGraphExec, unsigned int* graphId);
13: cuGraphNodeGetParams(CUgraphNode hNode, CUgraphNodeParams* nodeParams @node);
13: cuGraphAddNode_v3(CUgraphNode* phGraphNode, CUgraph hGraph,
    const CUgraphNode* dependencies[numDependencies] @uncounted,
    const CUgraphEdgeData* dependencyData[numDependencies] @uncounted, size_t numDependencies,
    in CUgraphNodeParams* nodeParams @filled);
13: cuGraphNodeSetParams_v2(CUgraphNode hNode, in CUgraphNodeParams* nodeParams @node);
"""

; Generated from instances.c by `make runtime`.
; 70346ea69d4743a696ca0d1572bf193704c7d97d90437b5a9c724b3d70ebe939
define internal preserve_mostcc ptr @instance_insert_elsewhere(i64 %slot, i64 %caller) #0 {
entry:
  %call = call ptr @instance_table()
  %0 = load i64, ptr @instance_size, align 8
  %mul.i = mul i64 %slot, -7046029254386353131
  %shr.i = lshr i64 %mul.i, 32
  %mul1.i = mul i64 %shr.i, ptrtoint (ptr @instance_count to i64)
  %shr2.i = lshr i64 %mul1.i, 32
  br label %for.cond
for.cond:
  %n.0 = phi i64 [ 0, %entry ], [ %inc, %for.inc ]
  %cmp.not = icmp ult i64 %n.0, ptrtoint (ptr @instance_count to i64)
  %conv = zext i1 %cmp.not to i64
  %expval = call i64 @llvm.expect.i64(i64 %conv, i64 1)
  %tobool.not = icmp eq i64 %expval, 0
  br i1 %tobool.not, label %return, label %for.body
for.body:
  %add = add i64 %shr2.i, %n.0
  %cmp.i = icmp ult i64 %add, ptrtoint (ptr @instance_count to i64)
  %sub.i = sub nuw i64 %add, ptrtoint (ptr @instance_count to i64)
  %cond.i = select i1 %cmp.i, i64 %add, i64 %sub.i
  %mul.i4 = mul i64 %cond.i, %0
  %add.ptr.i = getelementptr inbounds i8, ptr %call, i64 %mul.i4
  %1 = load volatile i64, ptr %add.ptr.i, align 8
  %tobool7.not.not = icmp eq i64 %1, 0
  %conv14 = zext i1 %tobool7.not.not to i64
  %expval15 = call i64 @llvm.expect.i64(i64 %conv14, i64 1)
  %tobool16.not = icmp eq i64 %expval15, 0
  br i1 %tobool16.not, label %if.else, label %if.then
if.then:
  %2 = cmpxchg ptr %add.ptr.i, i64 0, i64 %slot seq_cst monotonic, align 8
  %3 = extractvalue { i64, i1 } %2, 1
  %conv22 = zext i1 %3 to i64
  %expval23 = call i64 @llvm.expect.i64(i64 %conv22, i64 1)
  %tobool24.not = icmp eq i64 %expval23, 0
  br i1 %tobool24.not, label %for.inc, label %return
if.else:
  %cmp26.not = icmp eq i64 %1, %slot
  %conv32 = zext i1 %cmp26.not to i64
  %expval33 = call i64 @llvm.expect.i64(i64 %conv32, i64 0)
  %tobool34.not = icmp eq i64 %expval33, 0
  br i1 %tobool34.not, label %for.inc, label %if.then35
if.then35:
  %caller36 = getelementptr inbounds nuw i8, ptr %add.ptr.i, i64 8
  %4 = load volatile i64, ptr %caller36, align 8
  %tobool37.not = icmp eq i64 %4, 0
  br i1 %tobool37.not, label %if.end44, label %land.lhs.true
land.lhs.true:
  %5 = load i64, ptr @text_start, align 8
  %sub.i15 = sub i64 %caller, %5
  %6 = load i64, ptr @text_size, align 8
  %cmp.i16 = icmp uge i64 %sub.i15, %6
  %rem.i = and i64 %caller, 15
  %cmp.i6 = icmp eq i64 %rem.i, 8
  %or.cond = and i1 %cmp.i16, %cmp.i6
  %or.cond.not = xor i1 %or.cond, true
  %tobool.i.not = icmp sgt i64 %caller, -1
  %or.cond88 = or i1 %or.cond.not, %tobool.i.not
  br i1 %or.cond88, label %if.end44, label %land.lhs.true2.i
land.lhs.true2.i:
  %7 = load i64, ptr @text_start, align 8
  %sub.i8 = add i64 %7, -4294967296
  %sub3.i = sub i64 %caller, %sub.i8
  %cmp4.i = icmp ult i64 %sub3.i, 8589934592
  br i1 %cmp4.i, label %land.rhs.i, label %if.end44
land.rhs.i:
  %8 = inttoptr i64 %caller to ptr
  %9 = load volatile i64, ptr %8, align 8
  %10 = load i64, ptr @trampoline_mark, align 8
  %cmp5.i = icmp eq i64 %9, %10
  br i1 %cmp5.i, label %if.then40, label %if.end44
if.then40:
  %mul.i.i = mul i64 %slot, -7046029254386353131
  %shr.i.i = lshr i64 %mul.i.i, 32
  %mul1.i.i = mul i64 %shr.i.i, ptrtoint (ptr @instance_count to i64)
  %shr2.i.i = lshr i64 %mul1.i.i, 32
  br label %do.body.i
do.body.i:
  %hole.i.0 = phi i64 [ %n.0, %if.then40 ], [ %inc.i, %if.end.i ]
  %inc.i = add i64 %hole.i.0, 1
  %cmp.i12.not = icmp ult i64 %inc.i, ptrtoint (ptr @instance_count to i64)
  br i1 %cmp.i12.not, label %if.end.i, label %return
if.end.i:
  %add.i = add i64 %shr2.i.i, %inc.i
  %cmp.i37.i = icmp ult i64 %add.i, ptrtoint (ptr @instance_count to i64)
  %sub.i40.i = sub nuw i64 %add.i, ptrtoint (ptr @instance_count to i64)
  %cond.i41.i = select i1 %cmp.i37.i, i64 %add.i, i64 %sub.i40.i
  %mul.i43.i = mul i64 %cond.i41.i, %0
  %add.ptr.i44.i = getelementptr inbounds i8, ptr %call, i64 %mul.i43.i
  %11 = cmpxchg ptr %add.ptr.i44.i, i64 0, i64 %slot seq_cst monotonic, align 8
  %12 = extractvalue { i64, i1 } %11, 1
  br i1 %12, label %do.body3.i, label %do.body.i
do.body3.i:
  %hole.i.1 = phi i64 [ %dec.i, %copy.exit ], [ %inc.i, %if.end.i ]
  br label %do.body4.i
do.body4.i:
  %from.i.0 = phi i64 [ %hole.i.1, %do.body3.i ], [ %dec.i, %do.body4.i ]
  %dec.i = add i64 %from.i.0, -1
  %add6.i = add i64 %shr2.i.i, %dec.i
  %cmp.i23.i = icmp ult i64 %add6.i, ptrtoint (ptr @instance_count to i64)
  %sub.i26.i = sub nuw i64 %add6.i, ptrtoint (ptr @instance_count to i64)
  %cond.i27.i = select i1 %cmp.i23.i, i64 %add6.i, i64 %sub.i26.i
  %mul.i29.i = mul i64 %cond.i27.i, %0
  %add.ptr.i30.i = getelementptr inbounds i8, ptr %call, i64 %mul.i29.i
  %13 = load volatile i64, ptr %add.ptr.i30.i, align 8
  %cmp9.i.not = icmp eq i64 %13, %slot
  br i1 %cmp9.i.not, label %do.end10.i, label %do.body4.i
do.end10.i:
  %add11.i = add i64 %shr2.i.i, %hole.i.1
  %cmp.i9.i = icmp ult i64 %add11.i, ptrtoint (ptr @instance_count to i64)
  %sub.i12.i = sub nuw i64 %add11.i, ptrtoint (ptr @instance_count to i64)
  %cond.i13.i = select i1 %cmp.i9.i, i64 %add11.i, i64 %sub.i12.i
  %mul.i15.i = mul i64 %cond.i13.i, %0
  %add.ptr.i16.i = getelementptr inbounds i8, ptr %call, i64 %mul.i15.i
  %add13.i = add i64 %shr2.i.i, %dec.i
  %cmp.i.i = icmp ult i64 %add13.i, ptrtoint (ptr @instance_count to i64)
  %sub.i.i = sub nuw i64 %add13.i, ptrtoint (ptr @instance_count to i64)
  %cond.i.i = select i1 %cmp.i.i, i64 %add13.i, i64 %sub.i.i
  %mul.i4.i = mul i64 %cond.i.i, %0
  %add.ptr.i.i = getelementptr inbounds i8, ptr %call, i64 %mul.i4.i
  br label %for.cond.i
for.cond.i:
  %word.i.0 = phi i64 [ 2, %do.end10.i ], [ %inc.i19, %for.body.i ]
  %div.i87 = lshr i64 %0, 3
  %cmp.i18 = icmp ult i64 %word.i.0, %div.i87
  br i1 %cmp.i18, label %for.body.i, label %copy.exit
for.body.i:
  %arrayidx.i = getelementptr inbounds i64, ptr %add.ptr.i.i, i64 %word.i.0
  %14 = load volatile i64, ptr %arrayidx.i, align 8
  %arrayidx1.i = getelementptr inbounds i64, ptr %add.ptr.i16.i, i64 %word.i.0
  store i64 %14, ptr %arrayidx1.i, align 8
  %inc.i19 = add i64 %word.i.0, 1
  br label %for.cond.i
copy.exit:
  %caller.i = getelementptr inbounds nuw i8, ptr %add.ptr.i16.i, i64 8
  %caller2.i = getelementptr inbounds nuw i8, ptr %add.ptr.i.i, i64 8
  %15 = load volatile i64, ptr %caller2.i, align 8
  store atomic i64 %15, ptr %caller.i release, align 8
  %cmp16.i.not = icmp eq i64 %dec.i, %n.0
  br i1 %cmp16.i.not, label %move_on.exit, label %do.body3.i
move_on.exit:
  br i1 %cmp.i12.not, label %if.end44, label %return
if.end44:
  %caller45 = getelementptr inbounds nuw i8, ptr %add.ptr.i, i64 8
  store i64 0, ptr %caller45, align 8
  br label %return
for.inc:
  %inc = add i64 %n.0, 1
  br label %for.cond
return:
  %retval.0 = phi ptr [ null, %move_on.exit ], [ %add.ptr.i, %if.end44 ], [ %add.ptr.i, %if.then ], [ null, %for.cond ], [ null, %do.body.i ]
  ret ptr %retval.0
}
define internal ptr @instance_insert(i64 %slot, ptr %return_address) alwaysinline nounwind {
entry:
  %call.i = call ptr @instance_table()
  %0 = load i64, ptr @instance_size, align 8
  %mul.i.i = mul i64 %slot, -7046029254386353131
  %shr.i.i = lshr i64 %mul.i.i, 32
  %mul1.i.i = mul i64 %shr.i.i, ptrtoint (ptr @instance_count to i64)
  %shr2.i.i = lshr i64 %mul1.i.i, 32
  %mul.i = mul i64 %shr2.i.i, %0
  %add.ptr.i = getelementptr inbounds i8, ptr %call.i, i64 %mul.i
  %tobool.i = icmp ne ptr %call.i, null
  call void @llvm.assume(i1 %tobool.i)
  %1 = load volatile i64, ptr %add.ptr.i, align 8
  %tobool.not.not = icmp eq i64 %1, 0
  %conv = zext i1 %tobool.not.not to i64
  %expval = call i64 @llvm.expect.i64(i64 %conv, i64 1)
  %tobool4.not = icmp eq i64 %expval, 0
  br i1 %tobool4.not, label %if.end, label %land.lhs.true
land.lhs.true:
  %2 = cmpxchg ptr %add.ptr.i, i64 0, i64 %slot seq_cst monotonic, align 8
  %3 = extractvalue { i64, i1 } %2, 1
  %conv10 = zext i1 %3 to i64
  %expval11 = call i64 @llvm.expect.i64(i64 %conv10, i64 1)
  %tobool12.not = icmp eq i64 %expval11, 0
  br i1 %tobool12.not, label %if.end, label %return
if.end:
  %4 = load volatile i64, ptr %return_address, align 8
  %call13 = call preserve_mostcc ptr @instance_insert_elsewhere(i64 %slot, i64 %4)
  br label %return
return:
  %retval.0 = phi ptr [ %call13, %if.end ], [ %add.ptr.i, %land.lhs.true ]
  ret ptr %retval.0
}
define internal preserve_mostcc ptr @instance_search_taken(i64 %slot) #0 {
entry:
  %call = call ptr @instance_table()
  %0 = load i64, ptr @instance_size, align 8
  %mul.i.i = mul i64 %slot, -7046029254386353131
  %shr.i.i = lshr i64 %mul.i.i, 32
  %mul1.i.i = mul i64 %shr.i.i, ptrtoint (ptr @instance_count to i64)
  %shr2.i.i = lshr i64 %mul1.i.i, 32
  br label %for.cond.i
for.cond.i:
  %n.i.0 = phi i64 [ 0, %entry ], [ %inc.i, %if.end25.i ]
  %cmp.i = icmp ult i64 %n.i.0, ptrtoint (ptr @instance_count to i64)
  %conv.i = zext i1 %cmp.i to i64
  %expval.i = call i64 @llvm.expect.i64(i64 %conv.i, i64 1)
  %tobool.i.not = icmp eq i64 %expval.i, 0
  br i1 %tobool.i.not, label %search.exit, label %for.body.i
for.body.i:
  %add.i = add i64 %shr2.i.i, %n.i.0
  %cmp.i.i = icmp ult i64 %add.i, ptrtoint (ptr @instance_count to i64)
  %sub.i.i = sub nuw i64 %add.i, ptrtoint (ptr @instance_count to i64)
  %cond.i.i = select i1 %cmp.i.i, i64 %add.i, i64 %sub.i.i
  %mul.i4.i = mul i64 %cond.i.i, %0
  %add.ptr.i.i = getelementptr inbounds i8, ptr %call, i64 %mul.i4.i
  %1 = load volatile i64, ptr %add.ptr.i.i, align 8
  %cmp4.i = icmp eq i64 %1, %slot
  %conv10.i = zext i1 %cmp4.i to i64
  %expval11.i = call i64 @llvm.expect.i64(i64 %conv10.i, i64 1)
  %tobool12.i.not = icmp eq i64 %expval11.i, 0
  br i1 %tobool12.i.not, label %if.end25.i, label %if.then.i
if.then.i:
  %caller.i = getelementptr inbounds nuw i8, ptr %add.ptr.i.i, i64 8
  %2 = load volatile i64, ptr %caller.i, align 8
  %tobool14.i.not = icmp eq i64 %2, 0
  br i1 %tobool14.i.not, label %if.end25.i, label %search.exit
if.end25.i:
  %inc.i = add i64 %n.i.0, 1
  br label %for.cond.i
search.exit:
  %retval.i.0 = phi ptr [ %add.ptr.i.i, %if.then.i ], [ null, %for.cond.i ]
  ret ptr %retval.i.0
}
define internal preserve_mostcc ptr @instance_search_newest(i64 %slot) #0 {
entry:
  %call = call ptr @instance_table()
  %0 = load i64, ptr @instance_size, align 8
  %mul.i.i = mul i64 %slot, -7046029254386353131
  %shr.i.i = lshr i64 %mul.i.i, 32
  %mul1.i.i = mul i64 %shr.i.i, ptrtoint (ptr @instance_count to i64)
  %shr2.i.i = lshr i64 %mul1.i.i, 32
  br label %for.cond.i
for.cond.i:
  %n.i.0 = phi i64 [ 0, %entry ], [ %inc.i, %if.end25.i ]
  %cmp.i = icmp ult i64 %n.i.0, ptrtoint (ptr @instance_count to i64)
  %conv.i = zext i1 %cmp.i to i64
  %expval.i = call i64 @llvm.expect.i64(i64 %conv.i, i64 1)
  %tobool.i.not = icmp eq i64 %expval.i, 0
  br i1 %tobool.i.not, label %search.exit, label %for.body.i
for.body.i:
  %add.i = add i64 %shr2.i.i, %n.i.0
  %cmp.i.i = icmp ult i64 %add.i, ptrtoint (ptr @instance_count to i64)
  %sub.i.i = sub nuw i64 %add.i, ptrtoint (ptr @instance_count to i64)
  %cond.i.i = select i1 %cmp.i.i, i64 %add.i, i64 %sub.i.i
  %mul.i4.i = mul i64 %cond.i.i, %0
  %add.ptr.i.i = getelementptr inbounds i8, ptr %call, i64 %mul.i4.i
  %1 = load volatile i64, ptr %add.ptr.i.i, align 8
  %cmp4.i = icmp eq i64 %1, %slot
  %conv10.i = zext i1 %cmp4.i to i64
  %expval11.i = call i64 @llvm.expect.i64(i64 %conv10.i, i64 1)
  %tobool12.i.not = icmp eq i64 %expval11.i, 0
  br i1 %tobool12.i.not, label %if.end25.i, label %if.then.i
if.then.i:
  %caller.i = getelementptr inbounds nuw i8, ptr %add.ptr.i.i, i64 8
  %2 = load volatile i64, ptr %caller.i, align 8
  %tobool14.i.not = icmp eq i64 %2, 0
  %spec.select = select i1 %tobool14.i.not, ptr %add.ptr.i.i, ptr null
  br label %search.exit
if.end25.i:
  %inc.i = add i64 %n.i.0, 1
  br label %for.cond.i
search.exit:
  %retval.i.0 = phi ptr [ %spec.select, %if.then.i ], [ null, %for.cond.i ]
  ret ptr %retval.i.0
}
define internal ptr @instance_find_taken(i64 %slot) alwaysinline nounwind {
entry:
  %call.i = call ptr @instance_table()
  %0 = load i64, ptr @instance_size, align 8
  %mul.i.i = mul i64 %slot, -7046029254386353131
  %shr.i.i = lshr i64 %mul.i.i, 32
  %mul1.i.i = mul i64 %shr.i.i, ptrtoint (ptr @instance_count to i64)
  %shr2.i.i = lshr i64 %mul1.i.i, 32
  %mul.i = mul i64 %shr2.i.i, %0
  %add.ptr.i = getelementptr inbounds i8, ptr %call.i, i64 %mul.i
  %tobool.i = icmp ne ptr %call.i, null
  call void @llvm.assume(i1 %tobool.i)
  %1 = load volatile i64, ptr %add.ptr.i, align 8
  %cmp.not = icmp eq i64 %1, %slot
  %conv = zext i1 %cmp.not to i64
  %expval = call i64 @llvm.expect.i64(i64 %conv, i64 1)
  %tobool.not = icmp eq i64 %expval, 0
  br i1 %tobool.not, label %if.end, label %land.lhs.true
land.lhs.true:
  %caller = getelementptr inbounds nuw i8, ptr %add.ptr.i, i64 8
  %2 = load volatile i64, ptr %caller, align 8
  %tobool3.not = icmp ne i64 %2, 0
  %conv8 = zext i1 %tobool3.not to i64
  %expval9 = call i64 @llvm.expect.i64(i64 %conv8, i64 1)
  %tobool10.not = icmp eq i64 %expval9, 0
  br i1 %tobool10.not, label %if.end, label %return
if.end:
  %call11 = call preserve_mostcc ptr @instance_search_taken(i64 %slot)
  br label %return
return:
  %retval.0 = phi ptr [ %call11, %if.end ], [ %add.ptr.i, %land.lhs.true ]
  ret ptr %retval.0
}
define internal ptr @instance_find_newest(i64 %slot) alwaysinline nounwind {
entry:
  %call.i = call ptr @instance_table()
  %0 = load i64, ptr @instance_size, align 8
  %mul.i.i = mul i64 %slot, -7046029254386353131
  %shr.i.i = lshr i64 %mul.i.i, 32
  %mul1.i.i = mul i64 %shr.i.i, ptrtoint (ptr @instance_count to i64)
  %shr2.i.i = lshr i64 %mul1.i.i, 32
  %mul.i = mul i64 %shr2.i.i, %0
  %add.ptr.i = getelementptr inbounds i8, ptr %call.i, i64 %mul.i
  %tobool.i = icmp ne ptr %call.i, null
  call void @llvm.assume(i1 %tobool.i)
  %1 = load volatile i64, ptr %add.ptr.i, align 8
  %cmp.not = icmp eq i64 %1, %slot
  %conv = zext i1 %cmp.not to i64
  %expval = call i64 @llvm.expect.i64(i64 %conv, i64 1)
  %tobool.not = icmp eq i64 %expval, 0
  br i1 %tobool.not, label %if.end, label %if.then
if.then:
  %caller = getelementptr inbounds nuw i8, ptr %add.ptr.i, i64 8
  %2 = load volatile i64, ptr %caller, align 8
  %tobool3.not.not = icmp eq i64 %2, 0
  %conv10 = zext i1 %tobool3.not.not to i64
  %expval11 = call i64 @llvm.expect.i64(i64 %conv10, i64 1)
  %tobool12.not = icmp eq i64 %expval11, 0
  %.add.ptr.i = select i1 %tobool12.not, ptr null, ptr %add.ptr.i
  br label %return
if.end:
  %call13 = call preserve_mostcc ptr @instance_search_newest(i64 %slot)
  br label %return
return:
  %retval.0 = phi ptr [ %.add.ptr.i, %if.then ], [ %call13, %if.end ]
  ret ptr %retval.0
}
define internal preserve_mostcc i64 @instance_origin_elsewhere(i64 %caller, i64 %slot) #0 {
entry:
  %0 = inttoptr i64 %caller to ptr
  %1 = load i64, ptr @text_start, align 8
  %sub.i6 = sub i64 %caller, %1
  %2 = load i64, ptr @text_size, align 8
  %cmp.i7 = icmp uge i64 %sub.i6, %2
  %rem.i = and i64 %caller, 15
  %cmp.i = icmp eq i64 %rem.i, 8
  %or.cond = and i1 %cmp.i7, %cmp.i
  %or.cond.not = xor i1 %or.cond, true
  %tobool.i.not = icmp sgt i64 %caller, -1
  %or.cond30 = or i1 %or.cond.not, %tobool.i.not
  br i1 %or.cond30, label %return, label %land.lhs.true2.i
land.lhs.true2.i:
  %3 = load i64, ptr @text_start, align 8
  %sub.i = add i64 %3, -4294967296
  %sub3.i = sub i64 %caller, %sub.i
  %cmp4.i = icmp ult i64 %sub3.i, 8589934592
  br i1 %cmp4.i, label %land.rhs.i, label %return
land.rhs.i:
  %4 = inttoptr i64 %caller to ptr
  %5 = load volatile i64, ptr %4, align 8
  %6 = load i64, ptr @trampoline_mark, align 8
  %cmp5.i = icmp eq i64 %5, %6
  br i1 %cmp5.i, label %if.end, label %return
if.end:
  %start1 = getelementptr inbounds i8, ptr %0, i64 -16
  %7 = load ptr, ptr %start1, align 8
  %count2 = getelementptr inbounds i8, ptr %0, i64 -8
  %bf.load = load i64, ptr %count2, align 8
  %bf.clear = and i64 %bf.load, 4294967295
  %bf.lshr = lshr i64 %bf.load, 32
  %mul.i.i = mul i64 %slot, -7046029254386353131
  %shr.i.i = lshr i64 %mul.i.i, 32
  %mul1.i.i = mul nuw i64 %shr.i.i, %bf.clear
  %shr2.i.i = lshr i64 %mul1.i.i, 32
  br label %for.cond.i
for.cond.i:
  %n.i.0 = phi i64 [ 0, %if.end ], [ %inc.i, %if.end25.i ]
  %cmp.i2 = icmp ult i64 %n.i.0, %bf.clear
  %conv.i = zext i1 %cmp.i2 to i64
  %expval.i = call i64 @llvm.expect.i64(i64 %conv.i, i64 1)
  %tobool.i3.not = icmp eq i64 %expval.i, 0
  br i1 %tobool.i3.not, label %search.exit, label %for.body.i
for.body.i:
  %add.i = add i64 %shr2.i.i, %n.i.0
  %cmp.i.i = icmp ult i64 %add.i, %bf.clear
  %sub.i.i = sub nuw i64 %add.i, %bf.clear
  %cond.i.i = select i1 %cmp.i.i, i64 %add.i, i64 %sub.i.i
  %mul.i4.i = mul i64 %cond.i.i, %bf.lshr
  %add.ptr.i.i = getelementptr inbounds i8, ptr %7, i64 %mul.i4.i
  %8 = load volatile i64, ptr %add.ptr.i.i, align 8
  %cmp4.i4 = icmp eq i64 %8, %slot
  %conv10.i = zext i1 %cmp4.i4 to i64
  %expval11.i = call i64 @llvm.expect.i64(i64 %conv10.i, i64 1)
  %tobool12.i.not = icmp eq i64 %expval11.i, 0
  br i1 %tobool12.i.not, label %if.end25.i, label %if.then.i
if.then.i:
  %caller.i = getelementptr inbounds nuw i8, ptr %add.ptr.i.i, i64 8
  %9 = load volatile i64, ptr %caller.i, align 8
  %tobool14.i.not = icmp eq i64 %9, 0
  br i1 %tobool14.i.not, label %if.end25.i, label %search.exit
if.end25.i:
  %inc.i = add i64 %n.i.0, 1
  br label %for.cond.i
search.exit:
  %retval.i.0 = phi ptr [ %add.ptr.i.i, %if.then.i ], [ null, %for.cond.i ]
  %tobool.not = icmp eq ptr %retval.i.0, null
  br i1 %tobool.not, label %return, label %cond.true
cond.true:
  %origin = getelementptr inbounds nuw i8, ptr %retval.i.0, i64 16
  %10 = load volatile i64, ptr %origin, align 8
  br label %return
return:
  %retval.0 = phi i64 [ %caller, %land.rhs.i ], [ %caller, %search.exit ], [ %10, %cond.true ], [ %caller, %entry ], [ %caller, %land.lhs.true2.i ]
  ret i64 %retval.0
}
define internal i64 @instance_origin(i64 %caller, i64 %slot) alwaysinline nounwind {
entry:
  %0 = load i64, ptr @text_start, align 8
  %sub.i = sub i64 %caller, %0
  %1 = load i64, ptr @text_size, align 8
  %cmp.i.not = icmp ult i64 %sub.i, %1
  %conv = zext i1 %cmp.i.not to i64
  %expval = call i64 @llvm.expect.i64(i64 %conv, i64 1)
  %tobool.not = icmp eq i64 %expval, 0
  br i1 %tobool.not, label %cond.false, label %cond.end
cond.false:
  %call2 = call preserve_mostcc i64 @instance_origin_elsewhere(i64 %caller, i64 %slot)
  br label %cond.end
cond.end:
  %cond = phi i64 [ %call2, %cond.false ], [ %caller, %entry ]
  ret i64 %cond
}
define internal void @instance_take_over(ptr %instance, i64 %slot, ptr %return_address) alwaysinline nounwind {
entry:
  %0 = load volatile i64, ptr %return_address, align 8
  %1 = load i64, ptr @text_start, align 8
  %sub.i = sub i64 %0, %1
  %2 = load i64, ptr @text_size, align 8
  %cmp.i = icmp ult i64 %sub.i, %2
  %conv.i = zext i1 %cmp.i to i64
  %expval.i = call i64 @llvm.expect.i64(i64 %conv.i, i64 1)
  %tobool.i.not = icmp eq i64 %expval.i, 0
  br i1 %tobool.i.not, label %cond.false.i, label %instance_origin.exit
cond.false.i:
  %call2.i = call preserve_mostcc i64 @instance_origin_elsewhere(i64 %0, i64 %slot)
  br label %instance_origin.exit
instance_origin.exit:
  %cond.i = phi i64 [ %call2.i, %cond.false.i ], [ %0, %entry ]
  %origin = getelementptr inbounds nuw i8, ptr %instance, i64 16
  store i64 %cond.i, ptr %origin, align 8
  %caller1 = getelementptr inbounds nuw i8, ptr %instance, i64 8
  store atomic i64 %0, ptr %caller1 release, align 8
  store atomic i64 ptrtoint (ptr @trampoline to i64), ptr %return_address release, align 8
  ret void
}
define internal void @instance_release(ptr %instance) alwaysinline nounwind {
entry:
  %caller = getelementptr inbounds nuw i8, ptr %instance, i64 8
  store i64 0, ptr %caller, align 8
  store atomic i64 0, ptr %instance release, align 8
  ret void
}
